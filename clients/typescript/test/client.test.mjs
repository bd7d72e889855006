// Against a running server: ATOLL_URL and ATOLL_API_KEY. `tests/clients/test_typescript.py` starts one.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { Atoll, AtollError } from "../dist/index.js";

const atoll = new Atoll({ url: process.env.ATOLL_URL, key: process.env.ATOLL_API_KEY });
const name = "typescript";
const decode = (data) => new TextDecoder().decode(data);

test("what is missing is named, and no request is sent", async () => {
  assert.throws(() => new Atoll({ url: process.env.ATOLL_URL, key: undefined }), /the option key is missing/);
  await assert.rejects(async () => atoll.sandboxesGet(".."), /".." is no name or id/);
});

before(() => atoll.sandboxesCreate({ body: { name, labels: { made: "by-node" } } }));
after(() => atoll.sandboxesDelete(name, { query: { checkpoints: true } }));

test("a sandbox is listed by its label, with its fields", async () => {
  const { items, next } = await atoll.sandboxesList({ query: { label: ["made=by-node"], status: ["running"] } });
  assert.deepEqual([items.map((each) => each.name), next], [[name], null]);
});

test("a command has its output and its exit code", async () => {
  const result = await atoll.sandboxesExec(name, { body: { command: ["sh", "-c", "echo out; echo err >&2; exit 3"] } });
  assert.deepEqual([result.exit_code, result.stdout, result.stderr], [3, "out\n", "err\n"]);
});

test("output comes as events, and leaving them ends the command", async () => {
  const events = [];
  for await (const each of await atoll.sandboxesExecEvents(name, { body: { command: "echo ä; echo b" } })) events.push(each);
  assert.equal(events.filter((each) => each.event === "stdout").map((each) => each.data.text).join(""), "ä\nb\n");
  assert.equal(events.at(-1).data.exit_code, 0);
  const command = "echo begun; exec sleep 1000";
  for await (const { event } of await atoll.sandboxesExecEvents(name, { body: { command } })) {
    assert.equal(event, "stdout");
    break;
  }
});

test("a process takes input, and its output can be read from an offset", async () => {
  const { id } = await atoll.processesSpawn(name, { body: { command: "cat", stdin: true } });
  await atoll.processesStdin(name, id, { body: "hello", query: { eof: true } });
  assert.equal((await atoll.processesWait(name, id)).exit_code, 0);
  let text = "";
  for await (const { event, data } of await atoll.processesOutput(name, id, { query: { stdout_offset: 2 } })) {
    if (event === "stdout") text += data.text;
  }
  assert.equal(text, "llo");
});

test("files are bytes, and can be streamed both ways", async () => {
  const path = "/tmp/böse #?&.bin";
  const bytes = new Uint8Array(300_000).map((_, index) => index % 251);
  await atoll.filesWrite(name, { query: { path }, body: new Blob([bytes]).stream() });
  const read = await atoll.filesRead(name, { query: { path } });
  assert.deepEqual(new Uint8Array(await read.arrayBuffer()), bytes);
  const part = await atoll.filesRead(name, { query: { path }, headers: { Range: "bytes=10-19" } });
  assert.deepEqual([part.status, [...new Uint8Array(await part.arrayBuffer())]], [206, [...bytes.slice(10, 20)]]);
  assert.equal((await atoll.filesStat(name, { query: { path } })).size, bytes.length);
});

test("a checkpoint is taken, and forks begin there", async () => {
  await atoll.filesWrite(name, { query: { path: "/tmp/kept" }, body: "before" });
  const checkpoint = await atoll.checkpointsCreate(name, { body: { label: "good" } });
  await atoll.filesWrite(name, { query: { path: "/tmp/kept" }, body: "after" });
  const { items } = await atoll.sandboxesFork(name, { body: { names: ["typescript-fork"], checkpoint: "good" } });
  const read = await atoll.filesRead(items[0].name, { query: { path: "/tmp/kept" } });
  assert.equal(await read.text(), "before");
  assert.equal((await atoll.checkpointsGet(checkpoint.id)).label, "good");
  await atoll.sandboxesDelete("typescript-fork");
});

test("events of a sandbox can be read again", async () => {
  const types = [];
  const query = { after: 0, follow: false };
  for await (const { event, id, data } of await atoll.sandboxesEvents(name, { query })) {
    assert.ok(Number(id) > 0);
    assert.equal(data.sandbox, name);
    types.push(event);
  }
  assert.equal(types[0], "created");
});

test("a request with an idempotency key is carried out once", async () => {
  const send = () => atoll.volumesCreate({ body: { name: "cache" }, headers: { "Idempotency-Key": "once" } });
  assert.deepEqual(await send(), await send());
  await atoll.volumesDelete("cache");
});

test("an error has its code and its request id", async () => {
  await assert.rejects(atoll.sandboxesGet("not there?"), (error) => {
    assert.ok(error instanceof AtollError);
    assert.deepEqual([error.status, error.code, error.details], [404, "sandbox_not_found", { name: "not there?" }]);
    assert.match(error.requestId, /^req_/);
    return true;
  });
  const other = new Atoll({ url: process.env.ATOLL_URL, key: "wrong" });
  await assert.rejects(other.me(), { name: "AtollError", code: "unauthenticated", status: 401 });
});

test("a terminal goes on after its connection", async () => {
  const terminal = await atoll.terminal(name, { command: "read line; echo got-$line; read line; exit 5" });
  terminal.write("one\n");
  let seen = "";
  for await (const data of terminal) {
    seen += decode(data);
    if (seen.includes("got-one")) break;
  }
  terminal.close();
  const again = await atoll.terminal(name, terminal.resume);
  again.write("two\n");
  for await (const data of again) seen += decode(data);
  assert.equal(again.exit.exit_code, 5);
  assert.equal(seen.split("got-one").length, 2);
});
