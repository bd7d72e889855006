// A cell of JavaScript as scripts whose variables outlive it: what `kernel.mjs` runs instead of the text it was given.
//
// Owns how a cell is cut into tokens, and what is changed in it. Not here: running it. Node 18 or later, the standard
// library, and nothing else. Used by `kernel.mjs`, in the sandbox.
//
// Scripts of one context share what `var` and `function` declare, and only that may be declared again. So at the top
// level of a cell `let`, `const` and `class` become `var`. A cell that awaits is the body of an async function, where
// even `var` is local: its declarations become assignments, and a script before it declares the names and has the
// functions. `import` and `export` are those of modules: they become `await $import()`, and nothing. Every token keeps
// its line. What is mistaken here, such as a division that is taken for a regular expression, ends with its line.

import vm from "node:vm";

const WORD = /[\p{ID_Start}$_][\p{ID_Continue}$\u200c\u200d]*/uy;
const NUMBER = /(?:\d[\w.]*|\.\d[\w]*)/y;
const PUNCTUATION = /=>|\.\.\.|\?\.(?!\d)|\+\+|--|[^\s\w]/uy;
const REGEX = /\/(?![*/])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\[\n])+\/[a-z]*/y;
const STRING = /"(?:\\[\s\S]|[^"\\\n])*"|'(?:\\[\s\S]|[^'\\\n])*'/y;
const SPACE = /(?:[^\S\n]|\/\/[^\n]*|\/\*(?:(?!\*\/|\n)[\s\S])*\*\/)+/y;
const COMMENT = /\/\*[\s\S]*?\*\//y;
const BEFORE_EXPRESSION = new Set(
  "return typeof instanceof in of new delete void throw case do else await yield extends default".split(" "),
);
const CONTROL = new Set(["if", "for", "while", "switch", "catch", "with"]);
const MOST_CANDIDATES = 50;

/** The tokens of a cell: text, where it starts and ends, how many brackets it is in, whether a newline is before it,
 * and whether it is in the body of a function. Strings, templates and regular expressions have the kind "value". */
export function tokens(code) {
  const found = [];
  const open = [];
  let at = 0;
  let newline = false;
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(code)?.[0];
  };
  const add = (kind, length) => {
    const last = open.at(-1);
    found.push({
      kind,
      text: kind === "value" ? "" : code.slice(at, at + length),
      start: at,
      end: at + length,
      depth: open.length,
      newline,
      inFunction: last?.inFunction ?? false,
    });
    at += length;
    newline = false;
  };
  const template = (from) => {
    let i = from;
    while (i < code.length && code[i] !== "`") {
      if (code[i] === "\\") i++;
      else if (code[i] === "$" && code[i + 1] === "{") return i + 2;
      i++;
    }
    return Math.min(i + 1, code.length);
  };
  const takeTemplate = (from) => {
    const end = template(from);
    const nests = code[end - 1] === "{" && end >= from + 2;
    add("value", end - at);
    if (nests) open.push({ text: "`", inFunction: open.at(-1)?.inFunction ?? false });
  };
  while (at < code.length) {
    if (code[at] === "\n") {
      newline = true;
      at++;
      continue;
    }
    const space = match(SPACE) ?? match(COMMENT);
    if (space) {
      newline ||= space.includes("\n");
      at += space.length;
      continue;
    }
    const previous = found.at(-1);
    const word = match(WORD);
    const string = word ? null : match(STRING);
    if (word) add(previous && [".", "?.", "#"].includes(previous.text) ? "name" : "word", word.length);
    else if (string) add("value", string.length);
    else if (code[at] === "`") takeTemplate(at + 1);
    else if (code[at] === "/" && !endsExpression(previous) && match(REGEX)) add("value", match(REGEX).length);
    else if (match(NUMBER)) add("number", match(NUMBER).length);
    else {
      const text = match(PUNCTUATION) ?? code[at];
      if (text === "}" && open.at(-1)?.text === "`") {
        open.pop();
        takeTemplate(at + 1);
      } else if ("([{".includes(text)) {
        const isFunction = text === "{" && opensFunction(found);
        const isBlock = text === "{" && (isFunction || opensBlock(previous));
        add("punctuation", 1);
        found.at(-1).isBlock = isBlock;
        open.push({ text, index: found.length - 1, isBlock, inFunction: isFunction || (open.at(-1)?.inFunction ?? false) });
      } else if (")]}".includes(text)) {
        const opened = open.pop();
        add("punctuation", 1);
        found.at(-1).opened = opened?.index;
        found.at(-1).isBlock = opened?.isBlock;
      } else add("punctuation", text.length);
    }
  }
  return found;
}

/** Whether an expression may be over after this token, so that a slash divides and a newline may end a statement. */
function endsExpression(token) {
  if (!token) return false;
  if (token.kind === "word") return !BEFORE_EXPRESSION.has(token.text);
  if (token.kind !== "punctuation") return true;
  if (token.text === "}") return !token.isBlock;
  return [")", "]", "++", "--"].includes(token.text);
}

function opensFunction(found) {
  const previous = found.at(-1);
  if (previous?.text === "=>") return true;
  if (previous?.text !== ")") return false;
  const before = found[previous.opened - 1];
  return before !== undefined && ["word", "name", "value"].includes(before.kind)
    ? !(before.kind === "word" && CONTROL.has(before.text)) && !(before.text === "await" && found[previous.opened - 2]?.text === "for")
    : ["]", "*"].includes(before?.text);
}

function opensBlock(previous) {
  if (!previous) return true;
  if (previous.kind === "word") return ["else", "do", "try", "finally"].includes(previous.text);
  return [")", ";", "{", "=>"].includes(previous.text) || (previous.text === "}" && previous.isBlock);
}

/** Whether a statement begins with this token, which is in no brackets. */
function beginsStatement(all, index) {
  const previous = all[index - 1];
  if (!previous || previous.text === ";" || (previous.text === "}" && previous.isBlock)) return true;
  return all[index].newline && endsExpression(previous);
}

/** A cell ready to run: `{before, code, isAsync}`. `before` is a script that runs first, or null; the value of `code` is
 * that of the cell, in a promise if `isAsync`. */
export function rewrite(code) {
  const all = tokens(code);
  const wraps = all.some((token) => token.kind === "word" && token.text === "await" && !token.inFunction);
  const declarations = topLevel(all, code);
  const isAsync = wraps || declarations.some((each) => each.keyword === "import");
  const edits = imports(all);
  if (isAsync) return { ...awaiting(code, all, declarations, edits), isAsync };
  return { before: null, code: expression(changed(code, edits, 0, code.length), all) ?? plain(code, declarations, edits), isAsync };
}

/** `import(…)` and `import.meta` as those of the kernel: scripts have none of their own in every Node. */
function imports(all) {
  const is = (token, i) => token.text === "import" && token.kind === "word" && ["(", "."].includes(all[i + 1]?.text);
  return all.filter(is).map((token) => [token.start, token.end, "$import"]);
}

/** `{a: 1}` alone is an object and not a block. */
function expression(code, all) {
  const last = all.at(-1);
  if (all[0]?.text !== "{" || last?.text !== "}" || all[last.opened] !== all[0]) return null;
  return compiles(`(${code}\n)`) ? `(${code}\n)` : null;
}

function compiles(code) {
  try {
    new vm.Script(code);
    return true;
  } catch {
    return false;
  }
}

/** The declarations that outlive the cell: those in no brackets, and `var` in no function. Keyword, index of its token,
 * start, and end: of the whole for functions, classes and imports, of the keyword for others. */
function topLevel(all, code) {
  const found = [];
  for (let i = 0; i < all.length; i++) {
    const token = all[i];
    if (token.kind !== "word") continue;
    if (token.text === "var" && token.depth && !token.inFunction) {
      found.push({ keyword: "var", index: i, start: token.start, end: token.end });
    }
    if (token.depth || !beginsStatement(all, i)) continue;
    let at = i;
    if (token.text === "export") {
      found.push({ keyword: "export", index: i, start: token.start, end: all[i + 1]?.text === "default" ? all[i + 1].end : token.end });
      at = all[i + 1]?.text === "default" ? i + 2 : i + 1;
    }
    const word = all[at];
    const next = all[at + 1];
    if (!word || word.kind !== "word" || !next) continue;
    const isAsync = word.text === "async" && next.text === "function" && !next.newline;
    if (["const", "var"].includes(word.text) || (word.text === "let" && (next.kind === "word" || "[{".includes(next.text)))) {
      found.push({ keyword: word.text, index: at, start: word.start, end: word.end });
    } else if (word.text === "function" || word.text === "class" || isAsync) {
      let name = isAsync ? at + 2 : at + 1;
      if (all[name]?.text === "*") name++;
      if (all[name]?.kind !== "word" || all[name].text === "extends") continue;
      const opening = all.findIndex((each, index) => index > name && each.depth === 0 && each.text === "{");
      const closing = all.find((each) => each.text === "}" && each.opened === opening);
      if (opening < 0 || !closing) continue;
      const keyword = word.text === "class" ? "class" : "function";
      found.push({ keyword, index: at, start: word.start, end: closing.end, name: all[name].text });
    } else if (word.text === "import" && next.text !== "(" && next.text !== ".") {
      const statement = IMPORT.exec(code.slice(word.start));
      if (statement) found.push({ keyword: "import", index: at, start: word.start, end: word.start + statement[0].length, statement });
    }
  }
  return found;
}

function plain(code, declarations, edits) {
  for (const { keyword, start, end, name } of declarations) {
    if (keyword === "const" || keyword === "let") edits.push([start, end, "var".padEnd(keyword.length)]);
    if (keyword === "export") edits.push([start, end, blank(code.slice(start, end))]);
    if (keyword === "class") edits.push([start, start, `var ${name} = `], [end, end, ";"]);
  }
  return changed(code, inOrder(edits), 0, code.length);
}

const IMPORT =
  /^import\s*(?:(?<whole>[\p{ID_Start}$_][\p{ID_Continue}$]*)?\s*,?\s*(?:\*\s*as\s+(?<space>[\p{ID_Start}$_][\p{ID_Continue}$]*)|\{(?<names>[^}]*)\})?\s*from\s*)?(?<from>"[^"\n]*"|'[^'\n]*')(?:\s*(?:with|assert)\s*(?<attributes>\{[^}]*\}))?[^\S\n]*;?/u;

/** Of `import d, {a as b} from "x"`: the assignments that do the same, and the names. */
function imported({ groups }) {
  const options = groups.attributes ? `, {with: ${groups.attributes}}` : "";
  const source = `await $import(${groups.from}${options})`;
  const pairs = groups.whole ? [["default", groups.whole]] : [];
  for (const each of (groups.names ?? "").split(",")) {
    const [name, own = name] = each.trim().split(/\s+as\s+/);
    if (name) pairs.push([name, own]);
  }
  const names = pairs.map(([, own]) => own);
  const pattern = `{${pairs.map(([name, own]) => `${name}: ${own}`).join(", ")}}`;
  if (groups.space) {
    const rest = pairs.length ? `, ${pattern} = ${groups.space}` : "";
    return { text: `0,${groups.space} = ${source}${rest};`, names: [...names, groups.space] };
  }
  return { text: pairs.length ? `0,${pattern} = ${source};` : `${source};`, names };
}

function awaiting(code, all, declarations, edits) {
  const moved = [...edits];
  const names = [];
  let before = "";
  let at = 0;
  for (const { keyword, index, start, end, name, statement } of declarations) {
    if (keyword === "function") {
      before += blank(code.slice(at, start)) + changed(code, moved, start, end);
      at = end;
      edits.push([start, end, `;${blank(code.slice(start + 1, end))}`]);
    } else if (keyword === "class") {
      names.push(name);
      edits.push([start, start, `0,${name} = `], [end, end, ";"]);
    } else if (keyword === "import") {
      const { text, names: own } = imported(statement);
      names.push(...own);
      edits.push([start, end, text + blank(code.slice(start, end)).replace(/[^\n]/g, "")]);
    } else if (keyword === "export") {
      edits.push([start, end, blank(code.slice(start, end))]);
    } else {
      const inLoop = all[index - 1]?.text === "("; // `for (var …`
      edits.push([start, end, inLoop ? "" : "0,"]);
      declarators(all, index + 1, names, inLoop ? [] : edits);
    }
  }
  inOrder(edits);
  if (names.length) before += `\nvar ${[...new Set(names)].join(",")};`;
  return { before: before || null, code: returning(code, all, edits, declarations) };
}

/** The names that a declaration binds; one without a value gets `undefined`. */
function declarators(all, first, names, edits) {
  const { depth } = all[first - 1];
  let i = first;
  for (;;) {
    const target = all[i];
    if (!target) return;
    i = bound(all, i, names);
    if (all[i]?.text !== "=") {
      if (target.kind === "word") edits.push([target.end, target.end, "=void 0"]);
    } else {
      i++;
      while (all[i]?.depth > depth || (all[i]?.depth === depth && ![",", ";"].includes(all[i].text) && !beginsAfter(all, i))) i++;
    }
    if (all[i]?.depth !== depth || all[i].text !== ",") return;
    i++;
  }
}

function beginsAfter(all, index) {
  return all[index].kind !== "punctuation" && all[index - 1].text !== "=" && beginsStatement(all, index);
}

/** Reads one target of a declaration. Returns the index of the token after it. */
function bound(all, index, names) {
  const token = all[index];
  if (token.kind === "word") {
    names.push(token.text);
    return index + 1;
  }
  const closing = all.findIndex((each) => each.opened === index && each !== token);
  if (closing < 0) return index + 1;
  let i = index + 1;
  while (i < closing) {
    if ([",", "..."].includes(all[i].text) && all[i].kind === "punctuation") {
      i++;
      continue;
    }
    if (token.text === "{" && all[i - 1].text !== "...") i = afterKey(all, i);
    i = bound(all, i, names);
    while (i < closing && !(all[i].depth === token.depth + 1 && all[i].text === ",")) i++;
  }
  return closing + 1;
}

/** In `{key: target}` the index of the target; in `{name}` that of the name. */
function afterKey(all, index) {
  const end = all[index].text === "[" ? all.findIndex((each) => each.opened === index) + 1 : index + 1;
  return all[end]?.text === ":" ? end + 1 : index;
}

/** The body of an async function that returns the value of the last statement, if that is an expression. */
function returning(code, all, edits, declarations) {
  const starts = new Set(declarations.map((each) => each.start));
  const ends = new Set(declarations.filter((each) => each.keyword === "import").map((each) => each.end));
  let last = all.length - 1;
  while (last >= 0 && all[last].text === ";") last--;
  const end = all[last]?.end ?? 0;
  const wrapped = (body) => `(async () => {${body}\n})()`;
  let left = MOST_CANDIDATES;
  for (let i = last; i >= 0 && left; i--) {
    const { depth, start, text, kind } = all[i];
    if (depth || !beginsStatement(all, i)) continue;
    if (starts.has(start)) break;
    const previous = all[i - 1];
    const isOwn = !previous || previous.text === ";" || text === "{" || ends.has(previous.end);
    if (kind === "punctuation" && !isOwn) continue; // it may go on with the line before
    left--;
    const tail = changed(code, edits, start, end);
    const head = changed(code, edits, 0, start);
    if (compiles(`(async () => (${tail}\n))`) && compiles(wrapped(head))) return wrapped(`${head}return ${tail}`);
  }
  return wrapped(changed(code, edits, 0, code.length));
}

export const WRAPPER_LENGTH = "(async () => {".length;

function inOrder(edits) {
  return edits.sort((one, other) => one[0] - other[0] || other[1] - one[1]);
}

/** A part of the code with the edits that are in it. Of two that overlap, the first and longer one counts. */
function changed(code, edits, from, to) {
  let text = "";
  let at = from;
  for (const [start, end, by] of edits) {
    if (start < at || end > to) continue;
    text += code.slice(at, start) + by;
    at = end;
  }
  return text + code.slice(at, to);
}

function blank(text) {
  return text.replace(/[^\n]/g, " ");
}
