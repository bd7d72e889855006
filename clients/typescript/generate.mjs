// Writes src/schema.ts (types) and src/operations.ts (a method for each operation) from the OpenAPI document of Atoll.
//
//     node generate.mjs < openapi.json            write them
//     node generate.mjs --check < openapi.json    fail if they are not current
//
// `scripts/typescript_client.py` gives it the document, so that the client has what this version of the server has.
import { readFileSync, writeFileSync } from "node:fs";
import { text } from "node:stream/consumers";
import { fileURLToPath } from "node:url";
import openapiTS, { astToString } from "openapi-typescript";

const JSON_TYPE = "application/json";
const EVENT_TYPE = "text/event-stream";
const HEAD = "// Written by generate.mjs from the OpenAPI document; `make format` writes it again.\n";
const document = JSON.parse(await text(process.stdin));

const camel = (id) => id.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
const path = (name) => fileURLToPath(new URL(`src/${name}`, import.meta.url));

/** One or two methods: an operation that answers with JSON or with events has one for each. */
function methods(route, verb, operation) {
  const id = operation.operationId;
  const named = (operation.parameters ?? []).filter((each) => each.in === "path");
  const query = (operation.parameters ?? []).filter((each) => each.in === "query");
  const body = operation.requestBody;
  const bodyType = body && Object.keys(body.content)[0];
  const succeeded = Object.entries(operation.responses).filter(([status]) => status < "300");
  const types = new Set(succeeded.flatMap(([, response]) => Object.keys(response.content ?? {})));
  const required = body?.required || query.some((each) => each.required);

  const parts = [];
  if (query.length) parts.push(`Query<"${id}">`);
  if (body) parts.push(bodyType === JSON_TYPE ? `JsonBody<"${id}">` : "RawBody");
  const options = [...parts, "RequestOptions"].join(" & ");
  const parameters = named.map((each) => `${each.name}: ${each.schema.type === "integer" ? "number" : "string"}`);
  parameters.push(`options${required ? "" : "?"}: ${options}`);
  const url = route.replace(/{(\w+)}/g, (_, name) => `\${segment(${name})}`);
  const sent = bodyType ? `, "${bodyType}"` : "";
  const call = (kind, type) => `this.${kind}<${type}>("${verb.toUpperCase()}", \`${url}\`, options${sent})`;

  const lines = [];
  const write = (name, result, what) =>
    lines.push(
      `  /** ${operation.description.split("\n\n")[0].replace(/\s+/g, " ").trim()} */`,
      `  ${name}(${parameters.join(", ")}): ${result} {`,
      `    return ${what};`,
      "  }",
      "",
    );
  if (types.has(JSON_TYPE)) {
    const status = succeeded.find(([, response]) => response.content?.[JSON_TYPE])[0];
    write(camel(id), `Promise<Answer<"${id}", ${status}>>`, call("json", `Answer<"${id}", ${status}>`));
  } else if (types.size === 0) {
    write(camel(id), "Promise<void>", call("nothing", "void").replace("<void>", ""));
  } else if (!types.has(EVENT_TYPE)) {
    write(camel(id), "Promise<Response>", call("raw", "").replace("<>", ""));
  }
  if (types.has(EVENT_TYPE)) {
    const data = succeeded[0][1].content[EVENT_TYPE].schema.properties.data.contentSchema?.anyOf[0].$ref;
    const type = data ? `components["schemas"]["${data.split("/").pop()}"]` : "EventData";
    write(types.size > 1 ? `${camel(id)}Events` : camel(id), `Promise<EventStream<${type}>>`, call("events", type));
  }
  return lines.join("\n");
}

const operations = Object.entries(document.paths)
  .flatMap(([route, verbs]) => Object.entries(verbs).map(([verb, operation]) => [route, verb, operation]))
  .sort(([, , one], [, , other]) => (one.operationId < other.operationId ? -1 : 1))
  .map((each) => methods(...each));

// Every error is an AtollError, and headers are plain: their types would be three quarters of the file.
for (const verbs of Object.values(document.paths)) {
  for (const operation of Object.values(verbs)) {
    operation.parameters = operation.parameters.filter((each) => each.in === "path" || each.in === "query");
    for (const [status, response] of Object.entries(operation.responses)) {
      delete response.headers;
      if (status >= "300") delete operation.responses[status];
    }
  }
}

// What has a default can be left out of a body; the generator would require it, as it does rightly of answers.
const inBodies = new Set();
function withoutDefaults(value) {
  if (value === null || typeof value !== "object") return;
  if (value.$ref && !inBodies.has(value.$ref)) {
    inBodies.add(value.$ref);
    withoutDefaults(document.components.schemas[value.$ref.split("/").pop()]);
  }
  for (const each of Object.values(value.properties ?? {})) delete each.default;
  Object.values(value).forEach(withoutDefaults);
}
for (const verbs of Object.values(document.paths)) {
  for (const operation of Object.values(verbs)) withoutDefaults(operation.requestBody ?? null);
}

const written = {
  "schema.ts": HEAD + astToString(await openapiTS(document, { alphabetize: true })),
  "operations.ts": `${HEAD}
import { type EventData, type EventStream, Requests, segment } from "./requests.js";
import type { Answer, JsonBody, Query, RawBody, RequestOptions } from "./requests.js";
import type { components } from "./schema.js";

/** A method for each operation of the REST API. */
export class Operations extends Requests {
${operations.join("\n").trimEnd()}
}
`,
};

const stale = Object.entries(written).filter(([name, content]) => {
  try {
    return readFileSync(path(name), "utf8") !== content;
  } catch {
    return true;
  }
});
if (process.argv.includes("--check")) {
  if (stale.length) {
    console.error(`clients/typescript/src/${stale[0][0]} is not current: run 'make format'`);
    process.exitCode = 1;
  }
} else {
  for (const [name, content] of stale) writeFileSync(path(name), content);
}
