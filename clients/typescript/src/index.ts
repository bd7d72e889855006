// A client of the REST API of Atoll.

import { Operations } from "./operations.js";
import { Terminal, type TerminalOptions } from "./terminal.js";

/** A server, as one key sees it. */
export class Atoll extends Operations {
  /** A terminal in a sandbox. */
  async terminal(sandbox: string, options: TerminalOptions = {}): Promise<Terminal> {
    const { key, WebSocket = globalThis.WebSocket } = this.options;
    return Terminal.open(this.url("/", options), sandbox, key, WebSocket);
  }
}

export { AtollError } from "./requests.js";
export type { ConnectOptions, EventData, EventStream, RequestOptions, ServerEvent } from "./requests.js";
export type { components, operations } from "./schema.js";
export type { Terminal, TerminalExit, TerminalOptions } from "./terminal.js";
