// A terminal over a WebSocket. It counts the bytes of its output, so that it can be resumed where it broke off.

import { AtollError, segment } from "./requests.js";

/** A new terminal, or with `process` one that was started before: `resume` of it. */
export interface TerminalOptions {
  rows?: number;
  cols?: number;
  /** Unset: a login shell. */
  command?: string;
  user?: string;
  cwd?: string;
  process?: number;
  offset?: number;
}

/** How the process of a terminal ended. */
export interface TerminalExit {
  exit_code: number;
  signal: number | null;
}

/** The messages of the server that are not output. docs/server.md has them. */
type Control =
  | { type: "started"; process: number; offset: number }
  | { type: "gap"; offset: number }
  | ({ type: "exit" } & TerminalExit)
  | ({ type: "error" } & ConstructorParameters<typeof AtollError>[1]);

/** A terminal. Iterate over it for its output; `exit` is set when it has ended. */
export class Terminal implements AsyncIterable<Uint8Array> {
  /** Where a later `terminal(…, terminal.resume)` goes on. */
  readonly resume: { process?: number; offset: number } = { offset: 0 };
  exit: TerminalExit | undefined;

  private readonly queue: Uint8Array[] = [];
  private ended = false;
  private failed: Error | undefined;
  private wake: () => void = () => undefined;

  private constructor(private readonly socket: WebSocket) {
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => (typeof data === "string" ? this.control(JSON.parse(data)) : this.output(data));
    socket.onclose = ({ code }) => {
      if (this.exit === undefined && !this.ended) {
        this.failed ??= new Error(`the connection of the terminal was closed (${code})`);
      }
      this.end();
    };
  }

  /** Used by `Atoll.terminal`. */
  static async open(url: URL, sandbox: string, key: string, WebSocketClass: typeof WebSocket): Promise<Terminal> {
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.pathname = `/api/v1/sandboxes/${segment(sandbox)}/terminal`;
    const socket = new WebSocketClass(url, ["atoll.terminal", `atoll.key.${key}`]);
    const terminal = new Terminal(socket);
    await new Promise<void>((resolve, reject) => {
      socket.onopen = () => resolve();
      socket.onerror = () => reject(new Error(`a terminal of ${sandbox} could not be opened`));
    });
    return terminal;
  }

  /** Type. */
  write(data: string | Uint8Array): void {
    this.socket.send(typeof data === "string" ? new TextEncoder().encode(data) : (data as Uint8Array<ArrayBuffer>));
  }

  resize(rows: number, cols: number): void {
    this.socket.send(JSON.stringify({ type: "resize", rows, cols }));
  }

  /** Leave it. It goes on for five minutes, and can be resumed. */
  close(): void {
    this.end();
    this.socket.close();
  }

  async *[Symbol.asyncIterator](): AsyncIterator<Uint8Array> {
    for (;;) {
      const data = this.queue.shift();
      if (data !== undefined) yield data;
      else if (this.failed !== undefined) throw this.failed;
      else if (this.ended) return;
      else await new Promise<void>((resolve) => (this.wake = resolve));
    }
  }

  private output(data: ArrayBuffer): void {
    this.resume.offset += data.byteLength;
    this.queue.push(new Uint8Array(data));
    this.wake();
  }

  private control(message: Control): void {
    if (message.type === "started") this.resume.process = message.process;
    if (message.type === "started" || message.type === "gap") this.resume.offset = message.offset;
    if (message.type === "exit") this.exit = { exit_code: message.exit_code, signal: message.signal };
    if (message.type === "error") this.failed = new AtollError(this.socket.readyState, message);
  }

  private end(): void {
    this.ended = true;
    this.wake();
  }
}
