// The program inside a sandbox that executes cells of JavaScript and lets them call tools on the host.
//
// Owns what outlives a cell, how one is run, ended and interrupted, its errors, and the functions that stand for tools.
// Not here: what a cell's text becomes (`rewrite.mjs`); what a tool does, and whether it may be called (the host decides:
// `code/session.py`). Used by `code/session.py`, which sends this text to the image's Node: 18 or later, the standard
// library, and nothing else.
//
// Messages are lines of JSON on descriptor 3, which the children of this process do not get; `code/messages.py` describes
// them. stdout and stderr are the cell's own. At the end of a cell its marker is written to both.
//
// Interrupts: a signal reaches JavaScript only when the event loop runs, which an endless loop prevents. So a thread
// (`WATCHER`) sleeps in a script that SIGINT breaks. It asks this thread, through the inspector and so in the middle of
// whatever runs, where it is, and if that is code of a cell, ends it. That code's callers in this file end with it: a cell
// is therefore ended by a callback of its own, and nothing here waits for a promise. Node must not check its stack of
// asynchronous contexts then (`--no-force-async-hooks-checks`).
//
// Everything here runs in the process of the code that a model wrote, which may change any of it: the host believes
// nothing that it sends.

import fs from "node:fs";
import nodeModule, { createRequire } from "node:module";
import net from "node:net";
import path from "node:path";
import { Writable } from "node:stream";
import { pathToFileURL } from "node:url";
import util from "node:util";
import vm from "node:vm";
import { Worker } from "node:worker_threads";

const { parse, stringify } = JSON;
const { setImmediate, setTimeout } = globalThis;
const exit = process.reallyExit.bind(process);
const MAX_CALL_BYTES = 4 * 1024 * 1024;
const MAX_TEXT_CHARS = 100_000;
const MAX_PARTS_BYTES = 16 * 1024 * 1024;
const MAX_SOURCES = 1000;
const UNWIND_MS = 100; // how long a cell may take to end after its calls were interrupted
const OUTBOX = path.resolve("outbox");
const NO_INPUT =
  "there is no standard input here: nobody could answer. Assign the value to a variable, or get it with a tool";

class ToolError extends Error {
  constructor(message, type = "ToolError") {
    super(type === "ToolError" ? message : `${type}: ${message}`);
    this.type = type;
  }
}
ToolError.prototype.name = "ToolError";

class Interrupted extends Error {
  constructor() {
    super("the cell was interrupted");
  }
}
Interrupted.prototype.name = "Interrupted";

class Exit {
  constructor(code) {
    this.code = code;
  }
}

// ------------------------------------------------------------------------------------------------------------- channel

let channel;

function send(message) {
  let line = stringify(message);
  if (/[^\0-~]/.test(line)) line = line.replace(/[^\0-~]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  if (message.t === "call" && line.length > MAX_CALL_BYTES) {
    throw new TypeError(`the arguments take ${line.length} bytes; a call may take ${MAX_CALL_BYTES}`);
  }
  channel.write(`${line}\n`, "latin1");
}

function listen(rest, take) {
  let chunks = [];
  const feed = (data) => {
    let from = 0;
    for (let end = data.indexOf(10); end >= 0; end = data.indexOf(10, from)) {
      chunks.push(data.subarray(from, end));
      const line = chunks.length === 1 ? chunks[0] : Buffer.concat(chunks);
      chunks = [];
      from = end + 1;
      let message = null;
      try {
        message = line.length ? parse(line.toString("utf8")) : null;
      } catch {
        // the line of a host that ended while it wrote
      }
      if (message !== null && typeof message === "object") take(message);
    }
    if (from < data.length) chunks.push(data.subarray(from));
  };
  channel = new net.Socket({ fd: 3, readable: true, writable: true });
  channel.on("data", feed);
  channel.on("end", () => exit(0));
  channel.on("error", () => exit(0));
  feed(rest);
}

// --------------------------------------------------------------------------------------------------------------- tools

const calls = new Map(); // number → {message, stub, trace, resolve, reject}
let lastCall = 0;
let stubs = new Map();
let made = []; // what the cell has called: {call, name, trace}

/** The promise of a call. Whoever awaits it, or chains to it, reads its constructor. */
class ToolCall extends Promise {
  isUsed = false;

  static get [Symbol.species]() {
    return Promise;
  }

  get [Symbol.iterator]() {
    throw new TypeError("the result of a tool was not awaited: write `await` before the call");
  }

  [Symbol.toPrimitive]() {
    throw new TypeError("the result of a tool was not awaited: write `await` before the call");
  }
}

Object.defineProperty(ToolCall.prototype, "constructor", {
  get() {
    this.isUsed = true;
    return Promise;
  },
});

function define(specs) {
  for (const [name, stub] of stubs) if (globalThis[name] === stub) delete globalThis[name];
  stubs = new Map(specs.map((spec) => [spec.name, makeStub(spec)]));
  for (const [name, stub] of stubs) hide(globalThis, name, stub);
}

function makeStub(spec) {
  const names = spec.params.map(([name]) => name);
  const stub = (...args) => {
    const trace = {};
    Error.captureStackTrace(trace, stub);
    let message;
    try {
      message = { t: "call", call: ++lastCall, cell: number, tool: spec.name, args: plain(bind(spec, names, args), []) };
      send(message);
    } catch (error) {
      const refused = new TypeError(`${spec.name}() cannot be called so: ${error.message}`);
      Error.captureStackTrace(refused, stub);
      return ToolCall.reject(refused);
    }
    const call = new ToolCall((resolve, reject) => calls.set(message.call, { message, spec, trace, resolve, reject }));
    made.push({ call, name: spec.name, trace });
    return call;
  };
  Object.defineProperty(stub, "name", { value: spec.name });
  hide(stub, "doc", spec.doc ?? "");
  hide(stub, util.inspect.custom, () => `[tool ${spec.name}(${names.join(", ")})]`);
  return stub;
}

/** Arguments by name: one object that has them, or values in the order of the parameters. */
function bind(spec, names, args) {
  const taken = names.join(", ") || "no arguments";
  const required = spec.params.filter((each) => each[1]).map((each) => each[0]);
  const [first] = args;
  if (args.length === 1 && isPlain(first)) {
    const isAll = required.every((name) => name in first) && Object.keys(first).every((name) => names.includes(name));
    if (isAll || spec.mode === "anthropic" || spec.var) return first;
  }
  if (args.length > names.length) throw new TypeError(`it got ${args.length} arguments; it takes ${taken}`);
  const missing = required.filter((name) => args[names.indexOf(name)] === undefined);
  if (missing.length) throw new TypeError(`it lacks ${missing.join(", ")}; it takes ${taken}`);
  return Object.fromEntries(args.map((value, i) => [names[i], value]).filter(([, value]) => value !== undefined));
}

function isPlain(value) {
  if (value === null || typeof value !== "object") return false;
  const prototype = Object.getPrototypeOf(value);
  return prototype === null || prototype === Object.prototype;
}

/** A value as JSON: what the host gets of arguments. */
function plain(value, above) {
  if (value === undefined || value === null || typeof value === "string" || typeof value === "boolean") return value;
  if (typeof value === "number") {
    if (!Number.isFinite(value)) throw new TypeError(`${value} is not JSON`);
    return value;
  }
  if (typeof value === "bigint") return Number.isSafeInteger(Number(value)) ? Number(value) : String(value);
  if (typeof value !== "object") throw new TypeError(`a ${typeof value} is not JSON`);
  if (util.types.isPromise(value)) throw new TypeError("a promise is not JSON: write `await` before it");
  if (above.includes(value)) throw new TypeError("a value that contains itself is not JSON");
  if (above.length > 1000) throw new TypeError("it is nested too deep");
  const inner = [...above, value];
  if (typeof value.toJSON === "function" && !Buffer.isBuffer(value)) return plain(value.toJSON(), inner);
  if (ArrayBuffer.isView(value)) return Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64");
  if (Array.isArray(value) || value instanceof Set) return Array.from(value, (each) => plain(each, inner) ?? null);
  const entries = value instanceof Map ? [...value] : Object.entries(value);
  return Object.fromEntries(entries.map(([key, each]) => [String(key), plain(each, inner)]));
}

function takeResult(message) {
  const waiting = calls.get(message.call);
  if (!waiting) return;
  calls.delete(message.call);
  if (!message.error) {
    waiting.resolve(convert(message.value, waiting.spec.returns ?? "any"));
    return;
  }
  waiting.reject(withTrace(new ToolError(String(message.error.message ?? ""), message.error.type), waiting.trace));
}

/** The error as if it had been thrown where the call was made. */
function withTrace(error, trace) {
  const frames = String(trace.stack).split("\n").slice(1);
  error.stack = [`${error.name}: ${error.message}`, ...frames].join("\n");
  return error;
}

/** A value of JSON as the type that the tool declares, where JavaScript has it. */
function convert(value, type) {
  if (type === "any" || value === null || value === undefined) return value;
  const [kind, inner] = type;
  if (kind === "optional") return convert(value, inner);
  if (kind === "list" && Array.isArray(value)) return value.map((each) => convert(each, inner));
  if (kind === "set" && Array.isArray(value)) return new Set(value.map((each) => convert(each, inner)));
  if (kind === "tuple" && Array.isArray(value)) return value.map((each, i) => convert(each, inner[i] ?? "any"));
  if (kind === "dict") return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, convert(each, inner)]));
  if (kind === "model" && models[inner]) {
    const fields = new Map(models[inner].fields);
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, convert(each, fields.get(key) ?? "any")]));
  }
  if (kind === "datetime") return new Date(value);
  if (kind === "decimal") return Number(value);
  if (kind === "bytes") return Buffer.from(value, "base64");
  return value;
}

let models = {};

// --------------------------------------------------------------------------------------------------------------- cells

let rewriting; // the module rewrite.mjs
let number = 0; // of the cell that runs, or ran last
let running = null; // {cell, marker, code}
let last = null;
let parts = [];
let partsBytes = 0;
let outboxSeen = new Map();
const inbox = [];
const sources = new Map(); // name of a cell → its lines
const unhandled = new Map(); // promise → why it was rejected

function take(message) {
  if (message.t === "result") takeResult(message);
  else if (message.t === "hello") answerHello(message);
  else if (message.t === "complete") send({ t: "completions", ...completions(String(message.code ?? "")) });
  else if (message.t === "tools") {
    models = message.models ?? {};
    define(message.tools);
  } else if (message.t === "run") {
    inbox.push(message);
    setImmediate(runNext); // not here: an interrupt would take the reading of the channel with it
  }
}

function answerHello({ nonce }) {
  const waiting = Array.from(calls.values(), (each) => each.message);
  send({ t: "ready", nonce, version: process.versions.node, running, calls: waiting, parts, last });
}

function runNext() {
  if (running || !inbox.length) return;
  const { cell, code, marker, typescript } = inbox.shift();
  number = cell;
  running = { cell, marker, code };
  [last, parts, partsBytes, made] = [null, [], 0, []];
  restoreStreams();
  const name = `cell-${cell}`;
  sources.set(name, code.split("\n"));
  if (sources.size > MAX_SOURCES) sources.delete(sources.keys().next().value);
  let value;
  try {
    const { before, code: text, isAsync } = rewriting.rewrite(typescript ? withoutTypes(code) : code);
    const script = new vm.Script(text, { filename: name, columnOffset: isAsync ? -rewriting.WRAPPER_LENGTH : 0 });
    if (before) new vm.Script(before, { filename: name }).runInThisContext({ displayErrors: false });
    value = script.runInThisContext({ displayErrors: false });
  } catch (error) {
    endSoon(cell, error, true);
    return;
  }
  if (util.types.isPromise(value)) {
    Promise.prototype.then.call(
      value,
      (result) => endSoon(cell, result, false),
      (error) => endSoon(cell, error, true),
    );
    void value.constructor; // it counts as awaited
  } else endSoon(cell, value, false);
}

/** TypeScript as JavaScript, by Node itself, or by the package `typescript` of the image. Nothing is checked. */
function withoutTypes(code) {
  if (typeof nodeModule.stripTypeScriptTypes === "function") {
    const { emitWarning } = process;
    process.emitWarning = () => {}; // that it is experimental
    try {
      return nodeModule.stripTypeScriptTypes(code);
    } catch (error) {
      if (error?.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw error;
    } finally {
      process.emitWarning = emitWarning;
    }
  }
  const typescript = installedTypescript();
  if (!typescript) {
    throw new TypeError(
      "this needs the package typescript in the image, or, for all but enums, namespaces and parameter properties, " +
        `Node 22.13 or newer; the image has Node ${process.versions.node}. Write JavaScript instead`,
    );
  }
  const { ModuleKind, ScriptTarget, transpileModule } = typescript;
  const compilerOptions = { module: ModuleKind.ESNext, target: ScriptTarget.ESNext, verbatimModuleSyntax: true };
  const { outputText, diagnostics } = transpileModule(code, { compilerOptions, reportDiagnostics: true });
  const [first] = diagnostics ?? [];
  if (first) throw new SyntaxError(typescript.flattenDiagnosticMessageText(first.messageText, "\n"));
  return outputText;
}

function installedTypescript() {
  const beside = path.resolve(process.execPath, "../../lib/node_modules/");
  for (const directory of [process.cwd(), beside, "/usr/lib/node_modules", "/usr/local/lib/node_modules"]) {
    try {
      return createRequire(path.join(directory, "cell.js"))("typescript");
    } catch {
      // not there
    }
    try {
      return createRequire(path.join(directory, "cell.js"))(path.join(directory, "typescript"));
    } catch {
      // not there either
    }
  }
  return null;
}

/** When promises that are rejected now have been reported. */
function endSoon(cell, value, isError) {
  setImmediate(() => end(cell, value, isError));
}

function end(cell, value, isError) {
  if (running?.cell !== cell) return; // it was interrupted before
  let error = null;
  if (isError) error = value instanceof Exit ? describeExit(value) : describe(value);
  else if (value !== undefined) {
    try {
      publish(bundle(value), "value");
    } catch (failure) {
      error = describe(failure);
    }
  }
  const { marker } = running;
  running = null;
  const streams = [
    ["stdout", 1],
    ["stderr", 2],
  ].filter(([, descriptor]) => writeAll(descriptor, Buffer.from(marker, "latin1")));
  last = { t: "done", cell, error, warnings: warnings(), outbox: outbox(), streams: streams.map(([name]) => name) };
  send(last);
  setImmediate(runNext);
}

function warnings() {
  const found = made
    .filter(({ call }) => !call.isUsed)
    .map(({ name, trace }) => {
      const line = lineOf(trace.stack);
      return `${name}(...)${line ? ` on line ${line}` : ""} was not awaited: write \`await ${name}(...)\``;
    });
  for (const reason of unhandled.values()) {
    const line = lineOf(reason?.stack);
    found.push(`a promise was rejected${line ? ` on line ${line}` : ""}, and nothing awaits it: ${firstLine(reason)}`);
  }
  unhandled.clear();
  made = [];
  return [...new Set(found)].slice(0, 100);
}

// ---------------------------------------------------------------------------------------------------------- interrupts

const WATCHER = `
const { workerData: shared } = require("node:worker_threads");
const vm = require("node:vm");
const inspector = require("node:inspector");
const session = new inspector.Session();
session.connectToMainThread();
const never = new Int32Array(new SharedArrayBuffer(4));
const broken = (name) => {
  try {
    new vm.Script(name + "()").runInThisContext({ breakOnSigint: true });
  } catch (error) {
    if (error.code !== "ERR_SCRIPT_EXECUTION_INTERRUPTED") throw error;
  }
  Atomics.store(shared, 0, 0);
  session.post("Runtime.evaluate", { expression: "__atoll_interrupt()" }, () => {});
  Atomics.wait(shared, 0, 0);
  if (Atomics.load(shared, 0) === 1) session.post("Runtime.terminateExecution", () => {});
};
globalThis.waitForSignal = () => { for (;;) Atomics.wait(never, 0, 0); };
globalThis.keepHandler = () => { for (;;) broken("waitForSignal"); };
for (;;) broken("keepHandler"); // a script around the other: the signal has no handler when none runs
`;

function watchForInterrupts() {
  const shared = new Int32Array(new SharedArrayBuffer(4));
  process.on("SIGINT", () => interrupt("", false)); // until the thread has it; and code cannot take it then
  process.on("SIGUSR2", () => {});
  const frozen = { value: () => answerWatcher(shared), enumerable: false };
  Object.defineProperty(globalThis, "__atoll_interrupt", frozen);
  const worker = new Worker(WATCHER, { eval: true, workerData: shared, stdin: false, env: {} });
  worker.on("error", () => {});
  worker.unref();
}

/** Runs in the middle of anything. 1: code of the cell is to be ended; 2: none runs. */
function answerWatcher(shared) {
  const { stackTraceLimit, prepareStackTrace } = Error;
  const trace = {};
  Object.assign(Error, { stackTraceLimit: 200, prepareStackTrace: undefined });
  Error.captureStackTrace(trace, answerWatcher);
  const frames = codeFrames(trace.stack);
  Object.assign(Error, { stackTraceLimit, prepareStackTrace });
  const isBusy = frames.length > 0;
  setImmediate(interrupt, frames.join("\n"), isBusy);
  Atomics.store(shared, 0, isBusy ? 1 : 2);
  Atomics.notify(shared, 0);
}

function codeFrames(stack) {
  return String(stack)
    .split("\n")
    .slice(1)
    .filter((frame) => !isOwnFrame(frame) && !/at <anonymous>:1:\d+$|\(node:|at node:/.test(frame));
}

/** End the cell. One that waits sees its calls fail; if it goes on, it does so in the background. */
function interrupt(stack, wasRunning) {
  if (!running) return;
  const { cell } = running;
  const error = new Interrupted();
  error.stack = `Interrupted: ${error.message}${stack ? `\n${stack}` : ""}`;
  if (wasRunning) {
    end(cell, error, true);
    return;
  }
  for (const [call, waiting] of calls) {
    if (waiting.message.cell !== cell) continue;
    calls.delete(call);
    send({ t: "cancel", call });
    waiting.reject(withTrace(new Interrupted(), waiting.trace));
  }
  setTimeout(() => end(cell, error, true), UNWIND_MS);
}

// -------------------------------------------------------------------------------------------------------------- errors

function isOwnFrame(frame) {
  if (/\batoll-(?:kernel|rewrite)\b|node:internal\/|node:vm:/.test(frame)) return true;
  const place = /\b(cell-\d+):(\d+):\d+\)?$/.exec(frame);
  return place !== null && Number(place[2]) > (sources.get(place[1])?.length ?? Infinity); // what is around its code
}

function lineOf(stack) {
  const found = /\bcell-\d+:(\d+)/.exec(typeof stack === "string" ? stack : "");
  return found ? Number(found[1]) : null;
}

function describe(error) {
  try {
    if (!util.types.isNativeError(error)) {
      const text = inspect(error);
      return { type: "Thrown", message: cut(text, 4000), traceback: `Uncaught ${cut(text, 20_000)}`, line: null };
    }
    const stack = `${error.stack}\n${traced(error, [])}`;
    const name = /\bcell-\d+/.exec(stack)?.[0];
    const lines = sources.get(name) ?? [];
    const line = name ? Math.min(lineOf(stack), lines.length) || null : null;
    const source = line ? `line ${line}: ${lines[line - 1].trim()}\n` : "";
    const traceback = cut(source + traced(error, []), 20_000);
    return { type: String(error.name).slice(0, 200), message: cut(String(error.message), 4000), traceback, line };
  } catch {
    return { type: "Error", message: "an error that cannot be shown was thrown", traceback: "", line: null };
  }
}

/** The stack of an error without frames of the kernel, and those of its causes. */
function traced(error, above) {
  if (!util.types.isNativeError(error) || above.includes(error) || above.length > 8) return inspect(error);
  let lines = String(error.stack).split("\n");
  if (/^cell-\d+:\d+$/.test(lines[0])) {
    lines = lines.slice(lines.findIndex((each) => each.startsWith(error.name))); // without the line as it was rewritten
  }
  let text = lines.filter((each) => !isOwnFrame(each)).join("\n");
  const inner = [...above, error];
  if (error.cause !== undefined) text += `\ncaused by ${traced(error.cause, inner)}`;
  for (const each of Array.isArray(error.errors) ? error.errors.slice(0, 10) : []) text += `\none of ${traced(each, inner)}`;
  return text;
}

function describeExit({ code }) {
  if (code === undefined || code === null || Number(code) === 0) return null;
  return { type: "ProcessExit", message: `process.exit(${code})`, traceback: "", line: null };
}

function firstLine(error) {
  try {
    return (util.types.isNativeError(error) ? `${error.name}: ${error.message}` : inspect(error)).split("\n")[0];
  } catch {
    return "an error that cannot be shown";
  }
}

function onUncaught(error) {
  if (error instanceof Exit || !running) {
    if (running) endSoon(running.cell, error, true);
    else if (!(error instanceof Exit)) unhandled.set({}, error);
    return;
  }
  const of = /\bcell-(\d+)/.exec(error?.stack ?? "");
  if (of && Number(of[1]) !== running.cell) unhandled.set({}, error); // left behind by an earlier cell
  else endSoon(running.cell, error, true);
}

function onRejection(reason, promise) {
  if (reason instanceof Exit) onUncaught(reason);
  else if (!(reason instanceof Interrupted)) unhandled.set(promise, reason);
}

// -------------------------------------------------------------------------------------------------------- what is shown

function inspect(value) {
  return util.inspect(value, { depth: 4, maxArrayLength: 100, maxStringLength: MAX_TEXT_CHARS, breakLength: 100 });
}

function cut(text, most = MAX_TEXT_CHARS) {
  return text.length <= most ? text : `${text.slice(0, most / 2)} … ${text.slice(-most / 2)}`;
}

/** All forms of a value, by MIME type. Binary forms are base64. */
function bundle(value) {
  const data = {};
  const forms = value?.[Symbol.for("Jupyter.display")];
  if (typeof forms === "function") {
    for (const [kind, form] of Object.entries(forms.call(value) ?? {})) {
      data[kind] = ArrayBuffer.isView(form) ? Buffer.from(form.buffer, form.byteOffset, form.byteLength).toString("base64") : plain(form, []);
    }
  }
  data["text/plain"] ??= cut(inspect(value));
  return data;
}

function publish(data, role) {
  let part = { role, data };
  const size = stringify(part).length;
  if (partsBytes + size > MAX_PARTS_BYTES) {
    part = { role, data: { "text/plain": `[left out: ${size} bytes; a cell may show ${MAX_PARTS_BYTES}]` } };
  }
  partsBytes += Math.min(size, MAX_PARTS_BYTES);
  parts.push(part);
  send({ t: "display", cell: number, part });
}

function outbox() {
  const changed = [];
  const now = new Map();
  const walk = (directory) => {
    for (const entry of fs.readdirSync(directory, { withFileTypes: true })) {
      const file = path.join(directory, entry.name);
      if (entry.isDirectory()) walk(file);
      if (!entry.isFile() || now.size >= 1000) continue;
      const { size, mtimeMs, ino } = fs.lstatSync(file);
      now.set(file, `${size} ${mtimeMs} ${ino}`);
      if (outboxSeen.get(file) !== now.get(file)) changed.push({ path: path.relative(OUTBOX, file), size });
    }
  };
  try {
    walk(OUTBOX);
  } catch {
    // there is none
  }
  outboxSeen = now;
  return changed;
}

function completions(code) {
  const word = /[\w$.]*$/.exec(code)[0];
  const names = word.split(".");
  const begun = names.pop();
  let object = globalThis;
  for (const name of names) {
    const held = object === null || object === undefined ? undefined : Object.getOwnPropertyDescriptor(Object(object), name);
    if (!held || !("value" in held)) return { word, found: [] };
    object = held.value;
  }
  const found = new Set();
  for (let each = Object(object); each !== null; each = Object.getPrototypeOf(each)) {
    for (const name of Object.getOwnPropertyNames(each)) {
      if (name.startsWith(begun) && /^[A-Za-z$_][\w$]*$/.test(name)) found.add([...names, name].join("."));
    }
  }
  return { word, found: [...found].sort().slice(0, 200) };
}

// -------------------------------------------------------------------------------------------------------------- streams

function writeAll(descriptor, data) {
  let at = 0;
  while (at < data.length) {
    try {
      at += fs.writeSync(descriptor, data, at);
    } catch (error) {
      if (error.code !== "EAGAIN") return false; // it is closed
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1);
    }
  }
  return true;
}

/** stdout or stderr. What was written is written: the marker of the cell comes after it. */
class Output extends Writable {
  constructor(descriptor) {
    super({ decodeStrings: true });
    this.fd = descriptor;
    this.isTTY = false;
  }

  _write(data, _encoding, done) {
    writeAll(this.fd, data);
    done();
  }
}

/** What an earlier cell did to `process.stdout` and `process.stderr` does not outlive it. */
function restoreStreams() {
  for (const [name, descriptor] of [
    ["stdout", 1],
    ["stderr", 2],
  ]) {
    if (process[name] instanceof Output && process[name].writable) continue;
    const stream = new Output(descriptor);
    Object.defineProperty(process, name, { value: stream, configurable: true, writable: true });
    console[`_${name}`] = stream;
  }
}

// -------------------------------------------------------------------------------------------------------------- inside

function hide(object, name, value) {
  Object.defineProperty(object, name, { value, configurable: true, writable: true, enumerable: false });
}

/** `const navigator = …` at the top of a cell replaces what Node has by that name, as it would in a file. */
function letGlobalsBeReplaced() {
  for (const [name, { get, set, configurable }] of Object.entries(Object.getOwnPropertyDescriptors(globalThis))) {
    if (!get || set || !configurable) continue;
    Object.defineProperty(globalThis, name, { get, set: (value) => hide(globalThis, name, value), configurable: true });
  }
}

function importFrom(load) {
  const here = () => pathToFileURL(path.join(process.cwd(), "cell.js")).href;
  const $import = (specifier, options) => {
    const text = String(specifier);
    const place = /^\.{0,2}\//.test(text) ? new URL(text, here()).href : text;
    return options === undefined ? load(place) : load(place, options);
  };
  const meta = Object.create(null, {
    url: { get: here, enumerable: true },
    dirname: { get: () => process.cwd(), enumerable: true },
    filename: { get: () => path.join(process.cwd(), "cell.js"), enumerable: true },
    resolve: { value: (name) => pathToFileURL(createRequire(here()).resolve(name)).href, enumerable: true },
  });
  return Object.assign($import, { meta });
}

function noInput() {
  const error = new Error(NO_INPUT);
  error.code = "EOF";
  throw error;
}

export function main(rest, rewrite, load) {
  rewriting = rewrite;
  process.on("uncaughtException", onUncaught);
  process.on("unhandledRejection", onRejection);
  process.on("rejectionHandled", (promise) => unhandled.delete(promise));
  Object.defineProperty(process, "stdin", { get: noInput, configurable: true });
  const { readFileSync } = fs;
  fs.readFileSync = (file, options) => (file === 0 || file === "/dev/stdin" ? noInput() : readFileSync(file, options));
  process.exit = (code) => {
    throw new Exit(code ?? process.exitCode);
  };
  restoreStreams();
  letGlobalsBeReplaced();
  const display = (...values) => values.forEach((value) => publish(bundle(value), "display"));
  const help = (tool) => console.log(tool?.doc ?? "help(tool) shows how to use a tool");
  const globals = { ToolError, display, help, $import: importFrom(load) };
  for (const [name, value] of Object.entries(globals)) hide(globalThis, name, value);
  for (const name of ["module", "exports", "__filename", "__dirname"]) delete globalThis[name];
  hide(globalThis, "__dirname", process.cwd());
  listen(rest, take);
  watchForInterrupts();
}
