// One request: its URL, its key, and what its answer becomes. It knows no route: those are in operations.ts, which is
// generated from the OpenAPI document.

import type { components, operations } from "./schema.js";

type Operation = keyof operations;

/** The query of an operation. */
export type Query<Id extends Operation> = Pick<operations[Id]["parameters"], "query">;

/** The JSON body of an operation. */
export type JsonBody<Id extends Operation> = operations[Id] extends {
  requestBody: { content: { "application/json": infer Body } };
}
  ? { body: Body }
  : never;

/** A body that is sent as it is. */
export interface RawBody {
  body?: BodyInit;
}

/** What every request can have. */
export interface RequestOptions {
  /** `Idempotency-Key`, `Range`, `Last-Event-ID` and so on. */
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

/** The JSON that an operation answers with. */
export type Answer<Id extends Operation, Status extends keyof operations[Id]["responses"]> =
  operations[Id]["responses"][Status] extends { content: { "application/json": infer Body } } ? Body : never;

/** The data of an event whose form depends on its name: docs/server.md says which fields it has. */
// eslint-disable-next-line @typescript-eslint/no-explicit-any
export type EventData = Record<string, any>;

/** A server-sent event. */
export interface ServerEvent<Data> {
  event: string;
  id?: string;
  data: Data;
}

/** Events as they come. Leaving the loop ends the request. The event `error` is thrown as an `AtollError`. */
export type EventStream<Data> = AsyncGenerator<ServerEvent<Data>, void, undefined>;

/** What the server answered instead of what was asked for. */
export class AtollError extends Error {
  /** Stable: `sandbox_not_found`, `quota_exceeded` and so on. */
  readonly code: string;
  readonly details: Record<string, unknown>;
  readonly requestId: string;
  /** Of HTTP. An error in a stream has that of the stream. */
  readonly status: number;

  constructor(status: number, body: components["schemas"]["ErrorBody"]) {
    super(body.message);
    this.name = "AtollError";
    this.status = status;
    this.code = body.code;
    this.details = body.details;
    this.requestId = body.request_id;
  }
}

/** How a server is reached. */
export interface ConnectOptions {
  /** Such as `https://atoll.example.com`. */
  url: string;
  key: string;
  /** The tenant to act in, for keys of the server itself. */
  tenant?: string;
  /** Unset: the one of the platform. */
  fetch?: typeof globalThis.fetch;
  /** Unset: the one of the platform. Node has one from version 22 on. */
  WebSocket?: typeof globalThis.WebSocket;
}

interface Sent extends RequestOptions {
  query?: object;
  body?: unknown;
}

export function segment(value: string | number): string {
  if (value === "" || value === "." || value === "..") throw new TypeError(`${JSON.stringify(value)} is no name or id`);
  return encodeURIComponent(value);
}

/** Sends requests. `Operations` has a method for each operation. */
export class Requests {
  constructor(protected readonly options: ConnectOptions) {
    for (const name of ["url", "key"] as const) {
      if (!options[name]) throw new TypeError(`the option ${name} is missing`); // from JavaScript, such as of a variable
    }
  }

  protected url(path: string, query: object = {}): URL {
    const url = new URL(path, this.options.url);
    for (const [name, value] of Object.entries(query)) {
      for (const each of Array.isArray(value) ? value : [value]) {
        if (each !== undefined && each !== null) url.searchParams.append(name, String(each));
      }
    }
    return url;
  }

  protected async raw(method: string, path: string, sent: Sent = {}, type?: string, accept?: string): Promise<Response> {
    const headers = new Headers(sent.headers);
    headers.set("X-API-Key", this.options.key);
    if (this.options.tenant !== undefined) headers.set("Atoll-Tenant", this.options.tenant);
    if (accept !== undefined) headers.set("Accept", accept);
    const request: RequestInit & { duplex?: "half" } = { method, headers, signal: sent.signal ?? null };
    if (type !== undefined && sent.body !== undefined) {
      headers.set("Content-Type", type);
      request.body = type === "application/json" ? JSON.stringify(sent.body) : (sent.body as BodyInit);
      if (sent.body instanceof ReadableStream) request.duplex = "half";
    }
    const response = await (this.options.fetch ?? fetch)(this.url(path, sent.query), request);
    if (!response.ok && response.status !== 304) throw await failure(response);
    return response;
  }

  protected async json<T>(method: string, path: string, sent?: Sent, type?: string): Promise<T> {
    return (await (await this.raw(method, path, sent, type, "application/json")).json()) as T;
  }

  protected async nothing(method: string, path: string, sent?: Sent, type?: string): Promise<void> {
    await (await this.raw(method, path, sent, type)).arrayBuffer();
  }

  protected async events<T>(method: string, path: string, sent?: Sent, type?: string): Promise<EventStream<T>> {
    const response = await this.raw(method, path, sent, type, "text/event-stream");
    return readEvents<T>(response);
  }
}

async function failure(response: Response): Promise<AtollError> {
  const text = await response.text();
  try {
    return new AtollError(response.status, JSON.parse(text));
  } catch {
    // Of something between the client and the server, such as a proxy.
    const message = `the server answered with ${response.status}: ${text.slice(0, 200)}`;
    return new AtollError(response.status, { code: "http_error", message, details: {}, request_id: "" });
  }
}

async function* readEvents<T>(response: Response): EventStream<T> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop()!;
      for (const block of blocks) {
        const fields = new Map(block.split("\n").map((line) => split(line, ": ")));
        const data = fields.get("data");
        if (data === undefined) continue; // a keep-alive
        const event = fields.get("event") ?? "message";
        if (event === "error") throw new AtollError(response.status, JSON.parse(data));
        yield { event, id: fields.get("id"), data: JSON.parse(data) as T };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function split(text: string, mark: string): [string, string] {
  const at = text.indexOf(mark);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + mark.length)];
}
