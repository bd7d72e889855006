// Written by generate.mjs from the OpenAPI document; `make format` writes it again.

import { type EventData, type EventStream, Requests, segment } from "./requests.js";
import type { Answer, JsonBody, Query, RawBody, RequestOptions } from "./requests.js";
import type { components } from "./schema.js";

/** A method for each operation of the REST API. */
export class Operations extends Requests {
  /** Who did what, the latest first. */
  auditList(options?: Query<"audit_list"> & RequestOptions): Promise<Answer<"audit_list", 200>> {
    return this.json<Answer<"audit_list", 200>>("GET", `/api/v1/audit`, options);
  }

  /** End a build, and answer when it has. The results of its complete steps are kept. One that has ended stays as it is. */
  buildsCancel(build: string, options?: RequestOptions): Promise<Answer<"builds_cancel", 200>> {
    return this.json<Answer<"builds_cancel", 200>>("POST", `/api/v1/builds/${segment(build)}/cancel`, options);
  }

  /** Begin a build. It goes on when the client is gone. The key needs the scope `sandboxes:exec`, too. */
  buildsCreate(options: JsonBody<"builds_create"> & RequestOptions): Promise<Answer<"builds_create", 201>> {
    return this.json<Answer<"builds_create", 201>>("POST", `/api/v1/builds`, options, "application/json");
  }

  /** A build's log as it is written: events `log`, each with a line. The last is `done`, with the build, once it has ended. */
  buildsEvents(build: string, options?: Query<"builds_events"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("GET", `/api/v1/builds/${segment(build)}/events`, options);
  }

  /** Whether files are there. They count as used now. */
  buildsFiles(files: string, options?: RequestOptions): Promise<Answer<"builds_files", 200>> {
    return this.json<Answer<"builds_files", 200>>("GET", `/api/v1/builds/files/${segment(files)}`, options);
  }

  /** One build: how far it is, why it has failed, or what it has made. */
  buildsGet(build: string, options?: RequestOptions): Promise<Answer<"builds_get", 200>> {
    return this.json<Answer<"builds_get", 200>>("GET", `/api/v1/builds/${segment(build)}`, options);
  }

  /** The builds of the tenant, from the first; the last 100 are remembered. */
  buildsList(options?: Query<"builds_list"> & RequestOptions): Promise<Answer<"builds_list", 200>> {
    return this.json<Answer<"builds_list", 200>>("GET", `/api/v1/builds`, options);
  }

  /** The lines of a build's log, from the first. `after` is the number of a line. */
  buildsLog(build: string, options?: Query<"builds_log"> & RequestOptions): Promise<Answer<"builds_log", 200>> {
    return this.json<Answer<"builds_log", 200>>("GET", `/api/v1/builds/${segment(build)}/log`, options);
  }

  /** Upload files that builds copy: a tar, which may be compressed with gzip. It is unpacked in the sandbox of a step alone. Those that were used longest ago are removed when there are too many. */
  buildsUpload(files: string, options: RawBody & RequestOptions): Promise<void> {
    return this.nothing("PUT", `/api/v1/builds/files/${segment(files)}`, options, "application/x-tar");
  }

  /** Upload a bundle: a gzipped tar with `manifest.json` and `tools/`. It is checked to its last byte, and nothing of it is executed. The same bytes again are the same bundle. */
  bundlesCreate(options: RawBody & RequestOptions): Promise<Answer<"bundles_create", 200>> {
    return this.json<Answer<"bundles_create", 200>>("POST", `/api/v1/bundles`, options, "application/gzip");
  }

  /** Delete a bundle, its bytes, and what was built of it. One that a config uses is refused. */
  bundlesDelete(bundle: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/bundles/${segment(bundle)}`, options);
  }

  /** One bundle: its manifest, and what models are told about its tools. */
  bundlesGet(bundle: string, options?: RequestOptions): Promise<Answer<"bundles_get", 200>> {
    return this.json<Answer<"bundles_get", 200>>("GET", `/api/v1/bundles/${segment(bundle)}`, options);
  }

  /** The bundles of the tenant, by id. */
  bundlesList(options?: Query<"bundles_list"> & RequestOptions): Promise<Answer<"bundles_list", 200>> {
    return this.json<Answer<"bundles_list", 200>>("GET", `/api/v1/bundles`, options);
  }

  /** Send a message to an agent, or the results of the calls that it waits for, and wait for its answer. */
  chat(config: string, options: JsonBody<"chat"> & RequestOptions): Promise<Answer<"chat", 200>> {
    return this.json<Answer<"chat", 200>>("POST", `/api/v1/chat/${segment(config)}`, options, "application/json");
  }

  /** Send a message to an agent, or the results of the calls that it waits for, and wait for its answer. */
  chatEvents(config: string, options: JsonBody<"chat"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("POST", `/api/v1/chat/${segment(config)}`, options, "application/json");
  }

  /** End a turn with the calls that it makes, or that it waits for. One that has ended stays as it is. */
  chatTurnsCancel(config: string, turn: string, options?: RequestOptions): Promise<Answer<"chat_turns_cancel", 200>> {
    return this.json<Answer<"chat_turns_cancel", 200>>("POST", `/api/v1/chat/${segment(config)}/turns/${segment(turn)}/cancel`, options);
  }

  /** The events of a turn, from its beginning or after the last that the client has, until its end. */
  chatTurnsEvents(config: string, turn: string, options?: RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("GET", `/api/v1/chat/${segment(config)}/turns/${segment(turn)}/events`, options);
  }

  /** A turn: whether it is under way, and what came of it. */
  chatTurnsGet(config: string, turn: string, options?: RequestOptions): Promise<Answer<"chat_turns_get", 200>> {
    return this.json<Answer<"chat_turns_get", 200>>("GET", `/api/v1/chat/${segment(config)}/turns/${segment(turn)}`, options);
  }

  /** Save a sandbox as it is now. It goes on. */
  checkpointsCreate(sandbox: string, options: JsonBody<"checkpoints_create"> & RequestOptions): Promise<Answer<"checkpoints_create", 201>> {
    return this.json<Answer<"checkpoints_create", 201>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/checkpoints`, options, "application/json");
  }

  /** Delete a checkpoint. What others are built on stays. */
  checkpointsDelete(checkpoint: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/checkpoints/${segment(checkpoint)}`, options);
  }

  /** One checkpoint. */
  checkpointsGet(checkpoint: string, options?: RequestOptions): Promise<Answer<"checkpoints_get", 200>> {
    return this.json<Answer<"checkpoints_get", 200>>("GET", `/api/v1/checkpoints/${segment(checkpoint)}`, options);
  }

  /** All checkpoints of the tenant, the oldest first. */
  checkpointsList(options?: Query<"checkpoints_list"> & RequestOptions): Promise<Answer<"checkpoints_list", 200>> {
    return this.json<Answer<"checkpoints_list", 200>>("GET", `/api/v1/checkpoints`, options);
  }

  /** Allow a call, with other arguments if they are given, or refuse it. */
  codeApprovalsDecide(sandbox: string, approval: string, options: JsonBody<"code_approvals_decide"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/approvals/${segment(approval)}`, options, "application/json");
  }

  /** The calls in all sessions of a sandbox that wait for an approval, by their id. */
  codeApprovalsList(sandbox: string, options?: Query<"code_approvals_list"> & RequestOptions): Promise<Answer<"code_approvals_list", 200>> {
    return this.json<Answer<"code_approvals_list", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/code/approvals`, options);
  }

  /** Run code, and wait until it has ended or waits for the client. */
  codeExecute(sandbox: string, session: string, options: JsonBody<"code_execute"> & RequestOptions): Promise<Answer<"code_execute", 200>> {
    return this.json<Answer<"code_execute", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}/execute`, options, "application/json");
  }

  /** Run code, and wait until it has ended or waits for the client. */
  codeExecuteEvents(sandbox: string, session: string, options: JsonBody<"code_execute"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}/execute`, options, "application/json");
  }

  /** An execution: one of the last eight of its session. Fails as the execution did, if it could not be run. */
  codeExecutionsGet(sandbox: string, session: string, execution: string, options?: Query<"code_executions_get"> & RequestOptions): Promise<Answer<"code_executions_get", 200>> {
    return this.json<Answer<"code_executions_get", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}/executions/${segment(execution)}`, options);
  }

  /** Interrupt the code that runs, as Ctrl-C would. Variables stay. Nothing happens if none runs. */
  codeInterrupt(sandbox: string, session: string, options?: RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}/interrupt`, options);
  }

  /** Give calls their results. Those of calls that have one, or that nothing waits for any more, are dropped. */
  codeResults(sandbox: string, session: string, options: JsonBody<"code_results"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}/results`, options, "application/json");
  }

  /** Begin a session: variables, imports and files of one execution are there for the next. */
  codeSessionsCreate(sandbox: string, options: JsonBody<"code_sessions_create"> & RequestOptions): Promise<Answer<"code_sessions_create", 201>> {
    return this.json<Answer<"code_sessions_create", 201>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions`, options, "application/json");
  }

  /** End a session, with what runs in it. Files stay. */
  codeSessionsDelete(sandbox: string, session: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}`, options);
  }

  /** A session. */
  codeSessionsGet(sandbox: string, session: string, options?: RequestOptions): Promise<Answer<"code_sessions_get", 200>> {
    return this.json<Answer<"code_sessions_get", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions/${segment(session)}`, options);
  }

  /** The sessions of a sandbox that were begun through this API, by their id. */
  codeSessionsList(sandbox: string, options?: Query<"code_sessions_list"> & RequestOptions): Promise<Answer<"code_sessions_list", 200>> {
    return this.json<Answer<"code_sessions_list", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/code/sessions`, options);
  }

  /** Create an agent config. */
  configsCreate(options: JsonBody<"configs_create"> & RequestOptions): Promise<Answer<"configs_create", 201>> {
    return this.json<Answer<"configs_create", 201>>("POST", `/api/v1/configs`, options, "application/json");
  }

  /** Delete an agent config with its versions, its workspace and its conversations. Turns under way are cancelled. */
  configsDelete(config: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/configs/${segment(config)}`, options);
  }

  /** An agent config, without the values of its secrets. */
  configsGet(config: string, options?: RequestOptions): Promise<Answer<"configs_get", 200>> {
    return this.json<Answer<"configs_get", 200>>("GET", `/api/v1/configs/${segment(config)}`, options);
  }

  /** The agent configs of the tenant, the oldest first. */
  configsList(options?: Query<"configs_list"> & RequestOptions): Promise<Answer<"configs_list", 200>> {
    return this.json<Answer<"configs_list", 200>>("GET", `/api/v1/configs`, options);
  }

  /** Change an agent config, which makes a new version of it. Turns that are under way keep theirs. */
  configsUpdate(config: string, options: JsonBody<"configs_update"> & RequestOptions): Promise<Answer<"configs_update", 200>> {
    return this.json<Answer<"configs_update", 200>>("PATCH", `/api/v1/configs/${segment(config)}`, options, "application/json");
  }

  /** The versions of an agent config, the newest first. */
  configsVersions(config: string, options?: Query<"configs_versions"> & RequestOptions): Promise<Answer<"configs_versions", 200>> {
    return this.json<Answer<"configs_versions", 200>>("GET", `/api/v1/configs/${segment(config)}/versions`, options);
  }

  /** Delete a conversation with all of its messages. A turn that is under way is cancelled first. */
  conversationsDelete(conversation: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/conversations/${segment(conversation)}`, options);
  }

  /** A conversation, with its messages. */
  conversationsGet(conversation: string, options?: Query<"conversations_get"> & RequestOptions): Promise<Answer<"conversations_get", 200>> {
    return this.json<Answer<"conversations_get", 200>>("GET", `/api/v1/conversations/${segment(conversation)}`, options);
  }

  /** The conversations of the tenant, the newest first. */
  conversationsList(options?: Query<"conversations_list"> & RequestOptions): Promise<Answer<"conversations_list", 200>> {
    return this.json<Answer<"conversations_list", 200>>("GET", `/api/v1/conversations`, options);
  }

  /** What happens to the sandboxes of the tenant. */
  eventsStream(options?: Query<"events_stream"> & RequestOptions): Promise<EventStream<components["schemas"]["SandboxEvent"]>> {
    return this.events<components["schemas"]["SandboxEvent"]>("GET", `/api/v1/events`, options);
  }

  /** A tar of a file or a directory, as it is read. The sandbox made it: unpack it with care. */
  filesArchive(sandbox: string, options?: Query<"files_archive"> & RequestOptions): Promise<Response> {
    return this.raw("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/archive`, options);
  }

  /** Set the permission bits. */
  filesChmod(sandbox: string, options: JsonBody<"files_chmod"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/files/chmod`, options, "application/json");
  }

  /** Give a file to a user inside and to that user's group. A symlink is given away itself. */
  filesChown(sandbox: string, options: JsonBody<"files_chown"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/files/chown`, options, "application/json");
  }

  /** The files below `path` that match a pattern: `*`, `?`, `[…]`, `{a,b}` within a name, `**` any directories. */
  filesGlob(sandbox: string, options: Query<"files_glob"> & RequestOptions): Promise<Answer<"files_glob", 200>> {
    return this.json<Answer<"files_glob", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/glob`, options);
  }

  /** The lines that match a regular expression, in a file or in all text files below a directory. */
  filesGrep(sandbox: string, options: Query<"files_grep"> & RequestOptions): Promise<Answer<"files_grep", 200>> {
    return this.json<Answer<"files_grep", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/grep`, options);
  }

  /** The entries of a directory by the bytes of their names, without `.` and `..`. Symlinks are not followed. */
  filesList(sandbox: string, options?: Query<"files_list"> & RequestOptions): Promise<Answer<"files_list", 200>> {
    return this.json<Answer<"files_list", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/list`, options);
  }

  /** Make a directory. */
  filesMkdir(sandbox: string, options: JsonBody<"files_mkdir"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/files/mkdir`, options, "application/json");
  }

  /** The contents of a regular file of any size, or one range of them. */
  filesRead(sandbox: string, options?: Query<"files_read"> & RequestOptions): Promise<Response> {
    return this.raw("GET", `/api/v1/sandboxes/${segment(sandbox)}/files`, options);
  }

  /** Remove a file, a symlink (never its target) or a directory. */
  filesRemove(sandbox: string, options?: Query<"files_remove"> & RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/sandboxes/${segment(sandbox)}/files`, options);
  }

  /** Rename `path` to `target`, atomically. A file or an empty directory that is there is replaced. */
  filesRename(sandbox: string, options: JsonBody<"files_rename"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/files/rename`, options, "application/json");
  }

  /** The attributes of a file, a directory or a symlink. */
  filesStat(sandbox: string, options?: Query<"files_stat"> & RequestOptions): Promise<Answer<"files_stat", 200>> {
    return this.json<Answer<"files_stat", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/stat`, options);
  }

  /** Make a symlink at `path` to `target`, which need not exist. */
  filesSymlink(sandbox: string, options: JsonBody<"files_symlink"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/files/symlink`, options, "application/json");
  }

  /** Unpack a tar, the body of the request, into a directory, which is made if it is missing. */
  filesUnpack(sandbox: string, options?: Query<"files_unpack"> & RawBody & RequestOptions): Promise<Answer<"files_unpack", 200>> {
    return this.json<Answer<"files_unpack", 200>>("PUT", `/api/v1/sandboxes/${segment(sandbox)}/files/archive`, options, "application/x-tar");
  }

  /** The changes at or below a path, from now on. */
  filesWatch(sandbox: string, options?: Query<"files_watch"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("GET", `/api/v1/sandboxes/${segment(sandbox)}/files/watch`, options);
  }

  /** Write a file: the body of the request is its contents, of any size. */
  filesWrite(sandbox: string, options?: Query<"files_write"> & RawBody & RequestOptions): Promise<Answer<"files_write", 200>> {
    return this.json<Answer<"files_write", 200>>("PUT", `/api/v1/sandboxes/${segment(sandbox)}/files`, options, "application/octet-stream");
  }

  /** Remove what nothing refers to, of all tenants. For keys of the server itself. */
  hostGc(options?: Query<"host_gc"> & RequestOptions): Promise<Answer<"host_gc", 200>> {
    return this.json<Answer<"host_gc", 200>>("POST", `/api/v1/gc`, options);
  }

  /** What the server's machine is able to. */
  hostGet(options?: RequestOptions): Promise<Answer<"host_get", 200>> {
    return this.json<Answer<"host_get", 200>>("GET", `/api/v1/host`, options);
  }

  /** What an image has, as its files say, if it is present. */
  hostImageContents(options: Query<"host_image_contents"> & RequestOptions): Promise<Answer<"host_image_contents", 200>> {
    return this.json<Answer<"host_image_contents", 200>>("GET", `/api/v1/host/image-contents`, options);
  }

  /** The images that are present and that the tenant may use, by reference. */
  imagesList(options?: Query<"images_list"> & RequestOptions): Promise<Answer<"images_list", 200>> {
    return this.json<Answer<"images_list", 200>>("GET", `/api/v1/images`, options);
  }

  /** Make an image present and current. As server-sent events it tells its progress. */
  imagesPull(options: JsonBody<"images_pull"> & RequestOptions): Promise<Answer<"images_pull", 200>> {
    return this.json<Answer<"images_pull", 200>>("POST", `/api/v1/images`, options, "application/json");
  }

  /** Make an image present and current. As server-sent events it tells its progress. */
  imagesPullEvents(options: JsonBody<"images_pull"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("POST", `/api/v1/images`, options, "application/json");
  }

  /** Remove an image, for all tenants. One that is in use is refused. */
  imagesRemove(reference: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/images/${segment(reference)}`, options);
  }

  /** Make a key. Its text is in this answer, and nowhere else. */
  keysCreate(options: JsonBody<"keys_create"> & RequestOptions): Promise<Answer<"keys_create", 201>> {
    return this.json<Answer<"keys_create", 201>>("POST", `/api/v1/keys`, options, "application/json");
  }

  /** One key, without its text. */
  keysGet(key: string, options?: RequestOptions): Promise<Answer<"keys_get", 200>> {
    return this.json<Answer<"keys_get", 200>>("GET", `/api/v1/keys/${segment(key)}`, options);
  }

  /** The keys of the tenant, also revoked ones; the oldest first. */
  keysList(options?: Query<"keys_list"> & RequestOptions): Promise<Answer<"keys_list", 200>> {
    return this.json<Answer<"keys_list", 200>>("GET", `/api/v1/keys`, options);
  }

  /** Have a key refused from now on. Its streams end within two seconds. */
  keysRevoke(key: string, options?: RequestOptions): Promise<Answer<"keys_revoke", 200>> {
    return this.json<Answer<"keys_revoke", 200>>("DELETE", `/api/v1/keys/${segment(key)}`, options);
  }

  /** The key, the tenant, and what counts for its quotas. */
  me(options?: RequestOptions): Promise<Answer<"me", 200>> {
    return this.json<Answer<"me", 200>>("GET", `/api/v1/me`, options);
  }

  /** Expose a port at a URL, which it keeps until it is taken back. Exposing it again gives the same. */
  portsExpose(sandbox: string, options: JsonBody<"ports_expose"> & RequestOptions): Promise<Answer<"ports_expose", 201>> {
    return this.json<Answer<"ports_expose", 201>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/ports`, options, "application/json");
  }

  /** The ports of a sandbox that are exposed, with their URLs and tokens, which is why it takes the scope of exec. */
  portsList(sandbox: string, options?: Query<"ports_list"> & RequestOptions): Promise<Answer<"ports_list", 200>> {
    return this.json<Answer<"ports_list", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/ports`, options);
  }

  /** Take a URL back, and cut what is under way through it. Does nothing if the port is not exposed. */
  portsUnexpose(sandbox: string, port: number, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/sandboxes/${segment(sandbox)}/ports/${segment(port)}`, options);
  }

  /** A command that was started through the API. */
  processesGet(sandbox: string, process: number, options?: RequestOptions): Promise<Answer<"processes_get", 200>> {
    return this.json<Answer<"processes_get", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}`, options);
  }

  /** Kill a process with all that it started. When this is answered, nothing of it is left. */
  processesKill(sandbox: string, process: number, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}`, options);
  }

  /** The commands that were started through the API: those that run, and the last 64 that ended, by number. */
  processesList(sandbox: string, options?: Query<"processes_list"> & RequestOptions): Promise<Answer<"processes_list", 200>> {
    return this.json<Answer<"processes_list", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/processes`, options);
  }

  /** The output of a process from an offset on, while it runs and after. Unset: from the oldest that is kept. */
  processesOutput(sandbox: string, process: number, options?: Query<"processes_output"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("GET", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}/output`, options);
  }

  /** All processes in the sandbox, by their pid. */
  processesPs(sandbox: string, options?: Query<"processes_ps"> & RequestOptions): Promise<Answer<"processes_ps", 200>> {
    return this.json<Answer<"processes_ps", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/ps`, options);
  }

  /** Change the size of its terminal. Nothing happens to a process that has none. */
  processesResize(sandbox: string, process: number, options: JsonBody<"processes_resize"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}/resize`, options, "application/json");
  }

  /** Send a signal to a process. */
  processesSignal(sandbox: string, process: number, options: JsonBody<"processes_signal"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}/signal`, options, "application/json");
  }

  /** Start a command, and leave it running: it ends by itself, when it is killed, or with its sandbox. */
  processesSpawn(sandbox: string, options: JsonBody<"processes_spawn"> & RequestOptions): Promise<Answer<"processes_spawn", 201>> {
    return this.json<Answer<"processes_spawn", 201>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/processes`, options, "application/json");
  }

  /** Write the body of the request, as it is, to the input of a process that was spawned with one. */
  processesStdin(sandbox: string, process: number, options?: Query<"processes_stdin"> & RawBody & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}/stdin`, options, "application/octet-stream");
  }

  /** Wait until a process has ended, or for `timeout_s`: its `exit_code` is then still unset. */
  processesWait(sandbox: string, process: number, options?: Query<"processes_wait"> & RequestOptions): Promise<Answer<"processes_wait", 200>> {
    return this.json<Answer<"processes_wait", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/processes/${segment(process)}/wait`, options);
  }

  /** Check the options of a sandbox, as far as they can be without creating it. What is wrong is answered as a create answers it. Secrets are not looked at, and quotas are not asked. */
  sandboxesCheck(options: JsonBody<"sandboxes_check"> & RequestOptions): Promise<void> {
    return this.nothing("POST", `/api/v1/sandboxes/check`, options, "application/json");
  }

  /** The checkpoints of a sandbox, the oldest first. */
  sandboxesCheckpoints(sandbox: string, options?: Query<"sandboxes_checkpoints"> & RequestOptions): Promise<Answer<"sandboxes_checkpoints", 200>> {
    return this.json<Answer<"sandboxes_checkpoints", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/checkpoints`, options);
  }

  /** Create a sandbox and wait until it answers. */
  sandboxesCreate(options: JsonBody<"sandboxes_create"> & RequestOptions): Promise<Answer<"sandboxes_create", 201>> {
    return this.json<Answer<"sandboxes_create", 201>>("POST", `/api/v1/sandboxes`, options, "application/json");
  }

  /** End a sandbox and remove all of it. Its checkpoints stay, unless they are to be deleted too. */
  sandboxesDelete(sandbox: string, options?: Query<"sandboxes_delete"> & RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/sandboxes/${segment(sandbox)}`, options);
  }

  /** What happens to a sandbox, until it is gone. */
  sandboxesEvents(sandbox: string, options?: Query<"sandboxes_events"> & RequestOptions): Promise<EventStream<components["schemas"]["SandboxEvent"]>> {
    return this.events<components["schemas"]["SandboxEvent"]>("GET", `/api/v1/sandboxes/${segment(sandbox)}/events`, options);
  }

  /** Run a command to its end. If the client leaves before that, the command is killed with all that it started. */
  sandboxesExec(sandbox: string, options: JsonBody<"sandboxes_exec"> & RequestOptions): Promise<Answer<"sandboxes_exec", 200>> {
    return this.json<Answer<"sandboxes_exec", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/exec`, options, "application/json");
  }

  /** Run a command to its end. If the client leaves before that, the command is killed with all that it started. */
  sandboxesExecEvents(sandbox: string, options: JsonBody<"sandboxes_exec"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("POST", `/api/v1/sandboxes/${segment(sandbox)}/exec`, options, "application/json");
  }

  /** A sandbox in one file. It goes on. */
  sandboxesExport(sandbox: string, options?: Query<"sandboxes_export"> & RequestOptions): Promise<Response> {
    return this.raw("GET", `/api/v1/sandboxes/${segment(sandbox)}/export`, options);
  }

  /** Give it a lifetime from now on. */
  sandboxesExtend(sandbox: string, options: JsonBody<"sandboxes_extend"> & RequestOptions): Promise<Answer<"sandboxes_extend", 200>> {
    return this.json<Answer<"sandboxes_extend", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/extend`, options, "application/json");
  }

  /** Create sandboxes that begin as this one is now, or was at a checkpoint. All of them, or none. */
  sandboxesFork(sandbox: string, options: JsonBody<"sandboxes_fork"> & RequestOptions): Promise<Answer<"sandboxes_fork", 201>> {
    return this.json<Answer<"sandboxes_fork", 201>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/fork`, options, "application/json");
  }

  /** A sandbox as it is now. It is not woken. */
  sandboxesGet(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_get", 200>> {
    return this.json<Answer<"sandboxes_get", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}`, options);
  }

  /** The limits in force. */
  sandboxesGetLimits(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_get_limits", 200>> {
    return this.json<Answer<"sandboxes_get_limits", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/limits`, options);
  }

  /** The policy of a sandbox's egress. */
  sandboxesGetNetwork(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_get_network", 200>> {
    return this.json<Answer<"sandboxes_get_network", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/network`, options);
  }

  /** Create a sandbox from a file that export wrote. Nothing in it is trusted. */
  sandboxesImport(options: Query<"sandboxes_import"> & RawBody & RequestOptions): Promise<Answer<"sandboxes_import", 201>> {
    return this.json<Answer<"sandboxes_import", 201>>("POST", `/api/v1/sandboxes/import`, options, "application/octet-stream");
  }

  /** The sandboxes of the tenant, by name. */
  sandboxesList(options?: Query<"sandboxes_list"> & RequestOptions): Promise<Answer<"sandboxes_list", 200>> {
    return this.json<Answer<"sandboxes_list", 200>>("GET", `/api/v1/sandboxes`, options);
  }

  /** Connections that programs inside asked for, the oldest first. As server-sent events it goes on with new ones. */
  sandboxesNetworkAudit(sandbox: string, options?: Query<"sandboxes_network_audit"> & RequestOptions): Promise<Answer<"sandboxes_network_audit", 200>> {
    return this.json<Answer<"sandboxes_network_audit", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/network/audit`, options);
  }

  /** Connections that programs inside asked for, the oldest first. As server-sent events it goes on with new ones. */
  sandboxesNetworkAuditEvents(sandbox: string, options?: Query<"sandboxes_network_audit"> & RequestOptions): Promise<EventStream<EventData>> {
    return this.events<EventData>("GET", `/api/v1/sandboxes/${segment(sandbox)}/network/audit`, options);
  }

  /** Freeze its processes in memory, until it is next used. */
  sandboxesPause(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_pause", 200>> {
    return this.json<Answer<"sandboxes_pause", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/pause`, options);
  }

  /** Restore a sandbox to a checkpoint. What was written since is lost, and processes end. */
  sandboxesRestore(sandbox: string, options: JsonBody<"sandboxes_restore"> & RequestOptions): Promise<Answer<"sandboxes_restore", 200>> {
    return this.json<Answer<"sandboxes_restore", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/restore`, options, "application/json");
  }

  /** Resume a paused sandbox. One that sleeps is refused: wake it. */
  sandboxesResume(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_resume", 200>> {
    return this.json<Answer<"sandboxes_resume", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/resume`, options);
  }

  /** Change limits, of a running sandbox too. No process is ended for a lower one. */
  sandboxesSetLimits(sandbox: string, options: JsonBody<"sandboxes_set_limits"> & RequestOptions): Promise<Answer<"sandboxes_set_limits", 200>> {
    return this.json<Answer<"sandboxes_set_limits", 200>>("PATCH", `/api/v1/sandboxes/${segment(sandbox)}/limits`, options, "application/json");
  }

  /** Set the policy of its egress. Open connections that it does not allow are cut. */
  sandboxesSetNetwork(sandbox: string, options: JsonBody<"sandboxes_set_network"> & RequestOptions): Promise<Answer<"sandboxes_set_network", 200>> {
    return this.json<Answer<"sandboxes_set_network", 200>>("PUT", `/api/v1/sandboxes/${segment(sandbox)}/network`, options, "application/json");
  }

  /** Put it to sleep until it is woken: using it is refused. */
  sandboxesShutdown(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_shutdown", 200>> {
    return this.json<Answer<"sandboxes_shutdown", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/shutdown`, options);
  }

  /** Put it to sleep on disk, until it is next used. The header Atoll-Slept says whether that was done now; if it would lose processes of one that is unused, that is paused instead. */
  sandboxesSleep(sandbox: string, options?: Query<"sandboxes_sleep"> & RequestOptions): Promise<Answer<"sandboxes_sleep", 200>> {
    return this.json<Answer<"sandboxes_sleep", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/sleep`, options);
  }

  /** What it uses now. */
  sandboxesStats(sandbox: string, options?: Query<"sandboxes_stats"> & RequestOptions): Promise<Answer<"sandboxes_stats", 200>> {
    return this.json<Answer<"sandboxes_stats", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/stats`, options);
  }

  /** What it used within the last hour. */
  sandboxesStatsHistory(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_stats_history", 200>> {
    return this.json<Answer<"sandboxes_stats_history", 200>>("GET", `/api/v1/sandboxes/${segment(sandbox)}/stats/history`, options);
  }

  /** Change labels, the lifetime or limits. When it fails, nothing is changed. */
  sandboxesUpdate(sandbox: string, options: JsonBody<"sandboxes_update"> & RequestOptions): Promise<Answer<"sandboxes_update", 200>> {
    return this.json<Answer<"sandboxes_update", 200>>("PATCH", `/api/v1/sandboxes/${segment(sandbox)}`, options, "application/json");
  }

  /** Start a sandbox that sleeps, was shut down or has ended, and resume a paused one. */
  sandboxesWake(sandbox: string, options?: RequestOptions): Promise<Answer<"sandboxes_wake", 200>> {
    return this.json<Answer<"sandboxes_wake", 200>>("POST", `/api/v1/sandboxes/${segment(sandbox)}/wake`, options);
  }

  /** The checkpoints of a sandbox, the oldest first, as clients of Sprites know them. */
  spritesCheckpoints(name: string, options?: RequestOptions): Promise<Answer<"sprites_checkpoints", 200>> {
    return this.json<Answer<"sprites_checkpoints", 200>>("GET", `/api/sandboxes/${segment(name)}/checkpoints`, options);
  }

  /** Delete a template, with all of its tags. Sandboxes that began as it stay, and so do the results of its steps. */
  templatesDelete(template: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/templates/${segment(template)}`, options);
  }

  /** Remove the kept results of steps that no template needs. The next build runs these steps again. */
  templatesGc(options?: RequestOptions): Promise<Answer<"templates_gc", 200>> {
    return this.json<Answer<"templates_gc", 200>>("POST", `/api/v1/templates/gc`, options);
  }

  /** One template, with its versions by tag. `default` is the one of those who name none. */
  templatesGet(template: string, options?: RequestOptions): Promise<Answer<"templates_get", 200>> {
    return this.json<Answer<"templates_get", 200>>("GET", `/api/v1/templates/${segment(template)}`, options);
  }

  /** The templates of the tenant, by name. One with a `reason` cannot be read, and only be deleted. */
  templatesList(options?: Query<"templates_list"> & RequestOptions): Promise<Answer<"templates_list", 200>> {
    return this.json<Answer<"templates_list", 200>>("GET", `/api/v1/templates`, options);
  }

  /** Let a tag mean what another one means now, in place of what it meant. */
  templatesTag(template: string, tag: string, options: JsonBody<"templates_tag"> & RequestOptions): Promise<Answer<"templates_tag", 200>> {
    return this.json<Answer<"templates_tag", 200>>("PUT", `/api/v1/templates/${segment(template)}/tags/${segment(tag)}`, options, "application/json");
  }

  /** Delete one tag of a template. Without any, it is deleted. */
  templatesUntag(template: string, tag: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/templates/${segment(template)}/tags/${segment(tag)}`, options);
  }

  /** Create a tenant. */
  tenantsCreate(options: JsonBody<"tenants_create"> & RequestOptions): Promise<Answer<"tenants_create", 201>> {
    return this.json<Answer<"tenants_create", 201>>("POST", `/api/v1/tenants`, options, "application/json");
  }

  /** Delete a tenant, its keys and what belongs to it. */
  tenantsDelete(tenant: string, options?: Query<"tenants_delete"> & RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/tenants/${segment(tenant)}`, options);
  }

  /** One tenant. */
  tenantsGet(tenant: string, options?: RequestOptions): Promise<Answer<"tenants_get", 200>> {
    return this.json<Answer<"tenants_get", 200>>("GET", `/api/v1/tenants/${segment(tenant)}`, options);
  }

  /** All tenants, by name. */
  tenantsList(options?: Query<"tenants_list"> & RequestOptions): Promise<Answer<"tenants_list", 200>> {
    return this.json<Answer<"tenants_list", 200>>("GET", `/api/v1/tenants`, options);
  }

  /** Change a tenant. Its sandboxes keep what they have. */
  tenantsUpdate(tenant: string, options: JsonBody<"tenants_update"> & RequestOptions): Promise<Answer<"tenants_update", 200>> {
    return this.json<Answer<"tenants_update", 200>>("PATCH", `/api/v1/tenants/${segment(tenant)}`, options, "application/json");
  }

  /** Create an empty volume. */
  volumesCreate(options: JsonBody<"volumes_create"> & RequestOptions): Promise<Answer<"volumes_create", 201>> {
    return this.json<Answer<"volumes_create", 201>>("POST", `/api/v1/volumes`, options, "application/json");
  }

  /** Remove a volume and its files. One that sandboxes mount is refused. */
  volumesDelete(volume: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/volumes/${segment(volume)}`, options);
  }

  /** The files of a volume, as a tar. */
  volumesExport(volume: string, options?: RequestOptions): Promise<Response> {
    return this.raw("GET", `/api/v1/volumes/${segment(volume)}/export`, options);
  }

  /** One volume. What it occupies is counted now. */
  volumesGet(volume: string, options?: RequestOptions): Promise<Answer<"volumes_get", 200>> {
    return this.json<Answer<"volumes_get", 200>>("GET", `/api/v1/volumes/${segment(volume)}`, options);
  }

  /** Create a volume with the files of a tar. When it fails, there is no volume. */
  volumesImport(volume: string, options: Query<"volumes_import"> & RawBody & RequestOptions): Promise<Answer<"volumes_import", 201>> {
    return this.json<Answer<"volumes_import", 201>>("POST", `/api/v1/volumes/${segment(volume)}/import`, options, "application/octet-stream");
  }

  /** The volumes of the tenant, by name. */
  volumesList(options?: Query<"volumes_list"> & RequestOptions): Promise<Answer<"volumes_list", 200>> {
    return this.json<Answer<"volumes_list", 200>>("GET", `/api/v1/volumes`, options);
  }

  /** The warm pools of the tenant. */
  warmPoolsList(options?: Query<"warm_pools_list"> & RequestOptions): Promise<Answer<"warm_pools_list", 200>> {
    return this.json<Answer<"warm_pools_list", 200>>("GET", `/api/v1/warm-pools`, options);
  }

  /** Remove all warm pools of the tenant, and their sandboxes. */
  warmPoolsRemove(options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/warm-pools`, options);
  }

  /** Keep sandboxes ready that creates with the same image, limits and runtime claim. It answers when they are. */
  warmPoolsSet(options: JsonBody<"warm_pools_set"> & RequestOptions): Promise<Answer<"warm_pools_set", 200>> {
    return this.json<Answer<"warm_pools_set", 200>>("PUT", `/api/v1/warm-pools`, options, "application/json");
  }

  /** Have events sent to a URL. */
  webhooksCreate(options: JsonBody<"webhooks_create"> & RequestOptions): Promise<Answer<"webhooks_create", 201>> {
    return this.json<Answer<"webhooks_create", 201>>("POST", `/api/v1/webhooks`, options, "application/json");
  }

  /** Delete a webhook and its deliveries. */
  webhooksDelete(webhook: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/webhooks/${segment(webhook)}`, options);
  }

  /** What was sent, or is to be, the latest first. */
  webhooksDeliveries(webhook: string, options?: Query<"webhooks_deliveries"> & RequestOptions): Promise<Answer<"webhooks_deliveries", 200>> {
    return this.json<Answer<"webhooks_deliveries", 200>>("GET", `/api/v1/webhooks/${segment(webhook)}/deliveries`, options);
  }

  /** One webhook, without its secret. */
  webhooksGet(webhook: string, options?: RequestOptions): Promise<Answer<"webhooks_get", 200>> {
    return this.json<Answer<"webhooks_get", 200>>("GET", `/api/v1/webhooks/${segment(webhook)}`, options);
  }

  /** The webhooks of the tenant. */
  webhooksList(options?: Query<"webhooks_list"> & RequestOptions): Promise<Answer<"webhooks_list", 200>> {
    return this.json<Answer<"webhooks_list", 200>>("GET", `/api/v1/webhooks`, options);
  }

  /** Send something of the type `test`. The deliveries tell what became of it. */
  webhooksTest(webhook: string, options?: RequestOptions): Promise<Answer<"webhooks_test", 202>> {
    return this.json<Answer<"webhooks_test", 202>>("POST", `/api/v1/webhooks/${segment(webhook)}/test`, options);
  }

  /** Change a webhook. */
  webhooksUpdate(webhook: string, options: JsonBody<"webhooks_update"> & RequestOptions): Promise<Answer<"webhooks_update", 200>> {
    return this.json<Answer<"webhooks_update", 200>>("PATCH", `/api/v1/webhooks/${segment(webhook)}`, options, "application/json");
  }

  /** Remove the workspace of an agent with its files. The next call of a tool makes another. */
  workspacesDelete(config: string, options?: RequestOptions): Promise<void> {
    return this.nothing("DELETE", `/api/v1/configs/${segment(config)}/workspace`, options);
  }

  /** The workspace of a sandboxed agent. */
  workspacesGet(config: string, options?: RequestOptions): Promise<Answer<"workspaces_get", 200>> {
    return this.json<Answer<"workspaces_get", 200>>("GET", `/api/v1/configs/${segment(config)}/workspace`, options);
  }

  /** One life of an agent's workspace; if it failed, with the reason. */
  workspacesInstance(config: string, external_id: string, options?: RequestOptions): Promise<Answer<"workspaces_instance", 200>> {
    return this.json<Answer<"workspaces_instance", 200>>("GET", `/api/v1/configs/${segment(config)}/workspace/instances/${segment(external_id)}`, options);
  }

  /** The lives of an agent's workspace, the oldest first: how each began and ended, and the end of its log. */
  workspacesInstances(config: string, options?: Query<"workspaces_instances"> & RequestOptions): Promise<Answer<"workspaces_instances", 200>> {
    return this.json<Answer<"workspaces_instances", 200>>("GET", `/api/v1/configs/${segment(config)}/workspace/instances`, options);
  }
}
