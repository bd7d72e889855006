// Written by generate.mjs from the OpenAPI document; `make format` writes it again.
export interface paths {
    "/api/sandboxes/{name}/checkpoints": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Sprite
         * @description The checkpoints of a sandbox, the oldest first, as clients of Sprites know them.
         */
        get: operations["sprites_checkpoints"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/audit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Audit
         * @description Who did what, the latest first.
         */
        get: operations["audit_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Builds
         * @description The builds of the tenant, from the first; the last 100 are remembered.
         */
        get: operations["builds_list"];
        put?: never;
        /**
         * Create
         * @description Begin a build. It goes on when the client is gone. The key needs the scope `sandboxes:exec`, too.
         */
        post: operations["builds_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds/{build}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One build: how far it is, why it has failed, or what it has made.
         */
        get: operations["builds_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds/{build}/cancel": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Cancel
         * @description End a build, and answer when it has. The results of its complete steps are kept. One that has ended stays as it
         *     is.
         */
        post: operations["builds_cancel"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds/{build}/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Events
         * @description A build's log as it is written: events `log`, each with a line. The last is `done`, with the build, once it has
         *     ended.
         */
        get: operations["builds_events"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds/{build}/log": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Log
         * @description The lines of a build's log, from the first. `after` is the number of a line.
         */
        get: operations["builds_log"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/builds/files/{files}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Uploaded
         * @description Whether files are there. They count as used now.
         */
        get: operations["builds_files"];
        /**
         * Upload
         * @description Upload files that builds copy: a tar, which may be compressed with gzip. It is unpacked in the sandbox of a step
         *     alone. Those that were used longest ago are removed when there are too many.
         */
        put: operations["builds_upload"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/bundles": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Bundles
         * @description The bundles of the tenant, by id.
         */
        get: operations["bundles_list"];
        put?: never;
        /**
         * Create
         * @description Upload a bundle: a gzipped tar with `manifest.json` and `tools/`. It is checked to its last byte, and nothing of
         *     it is executed. The same bytes again are the same bundle.
         */
        post: operations["bundles_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/bundles/{bundle}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One bundle: its manifest, and what models are told about its tools.
         */
        get: operations["bundles_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete a bundle, its bytes, and what was built of it. One that a config uses is refused.
         */
        delete: operations["bundles_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/chat/{config}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Chat
         * @description Send a message to an agent, or the results of the calls that it waits for, and wait for its answer.
         *
         *     When the client leaves, the turn goes on, and its answer is in the conversation. One turn of a conversation is under
         *     way at a time: another request meanwhile is refused (409) with its id.
         */
        post: operations["chat"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/chat/{config}/turns/{turn}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Turn
         * @description A turn: whether it is under way, and what came of it.
         */
        get: operations["chat_turns_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/chat/{config}/turns/{turn}/cancel": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Cancel
         * @description End a turn with the calls that it makes, or that it waits for. One that has ended stays as it is.
         */
        post: operations["chat_turns_cancel"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/chat/{config}/turns/{turn}/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Events
         * @description The events of a turn, from its beginning or after the last that the client has, until its end.
         */
        get: operations["chat_turns_events"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/checkpoints": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List All
         * @description All checkpoints of the tenant, the oldest first.
         */
        get: operations["checkpoints_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/checkpoints/{checkpoint}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One checkpoint.
         */
        get: operations["checkpoints_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete a checkpoint. What others are built on stays.
         */
        delete: operations["checkpoints_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/configs": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Configs
         * @description The agent configs of the tenant, the oldest first.
         */
        get: operations["configs_list"];
        put?: never;
        /**
         * Create
         * @description Create an agent config.
         */
        post: operations["configs_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/configs/{config}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description An agent config, without the values of its secrets.
         */
        get: operations["configs_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete an agent config with its versions, its workspace and its conversations. Turns under way are cancelled.
         */
        delete: operations["configs_delete"];
        options?: never;
        head?: never;
        /**
         * Update
         * @description Change an agent config, which makes a new version of it. Turns that are under way keep theirs.
         */
        patch: operations["configs_update"];
        trace?: never;
    };
    "/api/v1/configs/{config}/versions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Versions
         * @description The versions of an agent config, the newest first.
         */
        get: operations["configs_versions"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/configs/{config}/workspace": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Workspace
         * @description The workspace of a sandboxed agent.
         */
        get: operations["workspaces_get"];
        put?: never;
        post?: never;
        /**
         * Delete Workspace
         * @description Remove the workspace of an agent with its files. The next call of a tool makes another.
         */
        delete: operations["workspaces_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/configs/{config}/workspace/instances": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Instances
         * @description The lives of an agent's workspace, the oldest first: how each began and ended, and the end of its log.
         */
        get: operations["workspaces_instances"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/configs/{config}/workspace/instances/{external_id}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Instance
         * @description One life of an agent's workspace; if it failed, with the reason.
         */
        get: operations["workspaces_instance"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/conversations": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Conversations
         * @description The conversations of the tenant, the newest first.
         */
        get: operations["conversations_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/conversations/{conversation}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description A conversation, with its messages.
         */
        get: operations["conversations_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete a conversation with all of its messages. A turn that is under way is cancelled first.
         */
        delete: operations["conversations_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * All Events
         * @description What happens to the sandboxes of the tenant.
         */
        get: operations["events_stream"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/gc": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Gc
         * @description Remove what nothing refers to, of all tenants. For keys of the server itself.
         */
        post: operations["host_gc"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/host": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description What the server's machine is able to.
         */
        get: operations["host_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/host/image-contents": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Image Contents
         * @description What an image has, as its files say, if it is present.
         */
        get: operations["host_image_contents"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/images": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Images
         * @description The images that are present and that the tenant may use, by reference.
         */
        get: operations["images_list"];
        put?: never;
        /**
         * Pull
         * @description Make an image present and current. As server-sent events it tells its progress.
         */
        post: operations["images_pull"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/images/{reference}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /**
         * Remove
         * @description Remove an image, for all tenants. One that is in use is refused.
         */
        delete: operations["images_remove"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/keys": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Keys
         * @description The keys of the tenant, also revoked ones; the oldest first.
         */
        get: operations["keys_list"];
        put?: never;
        /**
         * Create Key
         * @description Make a key. Its text is in this answer, and nowhere else.
         */
        post: operations["keys_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/keys/{key}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Key
         * @description One key, without its text.
         */
        get: operations["keys_get"];
        put?: never;
        post?: never;
        /**
         * Revoke Key
         * @description Have a key refused from now on. Its streams end within two seconds.
         */
        delete: operations["keys_revoke"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/me": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Me
         * @description The key, the tenant, and what counts for its quotas.
         */
        get: operations["me"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Sandboxes
         * @description The sandboxes of the tenant, by name.
         */
        get: operations["sandboxes_list"];
        put?: never;
        /**
         * Create
         * @description Create a sandbox and wait until it answers.
         */
        post: operations["sandboxes_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description A sandbox as it is now. It is not woken.
         */
        get: operations["sandboxes_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description End a sandbox and remove all of it. Its checkpoints stay, unless they are to be deleted too.
         */
        delete: operations["sandboxes_delete"];
        options?: never;
        head?: never;
        /**
         * Update
         * @description Change labels, the lifetime or limits. When it fails, nothing is changed.
         */
        patch: operations["sandboxes_update"];
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/checkpoints": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Of One
         * @description The checkpoints of a sandbox, the oldest first.
         */
        get: operations["sandboxes_checkpoints"];
        put?: never;
        /**
         * Create
         * @description Save a sandbox as it is now. It goes on.
         */
        post: operations["checkpoints_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/approvals": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Approvals
         * @description The calls in all sessions of a sandbox that wait for an approval, by their id.
         */
        get: operations["code_approvals_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/approvals/{approval}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Decide
         * @description Allow a call, with other arguments if they are given, or refuse it.
         */
        post: operations["code_approvals_decide"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Sessions
         * @description The sessions of a sandbox that were begun through this API, by their id.
         */
        get: operations["code_sessions_list"];
        put?: never;
        /**
         * Create Session
         * @description Begin a session: variables, imports and files of one execution are there for the next.
         */
        post: operations["code_sessions_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions/{session}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Session
         * @description A session.
         */
        get: operations["code_sessions_get"];
        put?: never;
        post?: never;
        /**
         * Delete Session
         * @description End a session, with what runs in it. Files stay.
         */
        delete: operations["code_sessions_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions/{session}/execute": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Execute
         * @description Run code, and wait until it has ended or waits for the client.
         *
         *     An execution belongs to its session: when the client leaves, it goes on, and can be asked for. What the code does
         *     wrong is in the result, and is no error.
         */
        post: operations["code_execute"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions/{session}/executions/{execution}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Execution
         * @description An execution: one of the last eight of its session. Fails as the execution did, if it could not be run.
         */
        get: operations["code_executions_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions/{session}/interrupt": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Interrupt
         * @description Interrupt the code that runs, as Ctrl-C would. Variables stay. Nothing happens if none runs.
         */
        post: operations["code_interrupt"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/code/sessions/{session}/results": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Give Results
         * @description Give calls their results. Those of calls that have one, or that nothing waits for any more, are dropped.
         */
        post: operations["code_results"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Events Of One
         * @description What happens to a sandbox, until it is gone.
         */
        get: operations["sandboxes_events"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/exec": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Run Command
         * @description Run a command to its end. If the client leaves before that, the command is killed with all that it started.
         */
        post: operations["sandboxes_exec"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Export
         * @description A sandbox in one file. It goes on.
         */
        get: operations["sandboxes_export"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/extend": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Extend
         * @description Give it a lifetime from now on.
         */
        post: operations["sandboxes_extend"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Read File
         * @description The contents of a regular file of any size, or one range of them.
         *
         *     A file whose size the kernel does not know, as those in /proc, is sent whole and without a length. If a file is
         *     changed while it is read, the answer may be cut off, which its length shows.
         */
        get: operations["files_read"];
        /**
         * Write File
         * @description Write a file: the body of the request is its contents, of any size.
         *
         *     The file is replaced when all of it has arrived and is on the disk; if the request breaks off, it is as it was.
         */
        put: operations["files_write"];
        post?: never;
        /**
         * Remove File
         * @description Remove a file, a symlink (never its target) or a directory.
         */
        delete: operations["files_remove"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/archive": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Read Archive
         * @description A tar of a file or a directory, as it is read. The sandbox made it: unpack it with care.
         *
         *     An archive that is cut off by an error is not ended properly: neither the tar nor the transfer.
         */
        get: operations["files_archive"];
        /**
         * Unpack Archive
         * @description Unpack a tar, the body of the request, into a directory, which is made if it is missing.
         *
         *     Nothing is written outside of it. What was unpacked before an error stays.
         */
        put: operations["files_unpack"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/chmod": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Change Mode
         * @description Set the permission bits.
         */
        post: operations["files_chmod"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/chown": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Change Owner
         * @description Give a file to a user inside and to that user's group. A symlink is given away itself.
         */
        post: operations["files_chown"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/glob": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Find Files
         * @description The files below `path` that match a pattern: `*`, `?`, `[…]`, `{a,b}` within a name, `**` any directories.
         *
         *     If there are as many as `limit`, there may be more.
         */
        get: operations["files_glob"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/grep": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Search Files
         * @description The lines that match a regular expression, in a file or in all text files below a directory.
         *
         *     If there are as many as `limit`, there may be more.
         */
        get: operations["files_grep"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/list": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Directory
         * @description The entries of a directory by the bytes of their names, without `.` and `..`. Symlinks are not followed.
         */
        get: operations["files_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/mkdir": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Make Directory
         * @description Make a directory.
         */
        post: operations["files_mkdir"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/rename": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Rename File
         * @description Rename `path` to `target`, atomically. A file or an empty directory that is there is replaced.
         */
        post: operations["files_rename"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/stat": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Stat File
         * @description The attributes of a file, a directory or a symlink.
         */
        get: operations["files_stat"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/symlink": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Make Symlink
         * @description Make a symlink at `path` to `target`, which need not exist.
         */
        post: operations["files_symlink"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/files/watch": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Watch Files
         * @description The changes at or below a path, from now on.
         */
        get: operations["files_watch"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/fork": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Fork
         * @description Create sandboxes that begin as this one is now, or was at a checkpoint. All of them, or none.
         */
        post: operations["sandboxes_fork"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/limits": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Limits
         * @description The limits in force.
         */
        get: operations["sandboxes_get_limits"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        /**
         * Set Limits
         * @description Change limits, of a running sandbox too. No process is ended for a lower one.
         */
        patch: operations["sandboxes_set_limits"];
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/network": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Network
         * @description The policy of a sandbox's egress.
         */
        get: operations["sandboxes_get_network"];
        /**
         * Set Network
         * @description Set the policy of its egress. Open connections that it does not allow are cut.
         */
        put: operations["sandboxes_set_network"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/network/audit": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Network Audit
         * @description Connections that programs inside asked for, the oldest first. As server-sent events it goes on with new ones.
         */
        get: operations["sandboxes_network_audit"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/pause": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Pause
         * @description Freeze its processes in memory, until it is next used.
         */
        post: operations["sandboxes_pause"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/ports": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Ports
         * @description The ports of a sandbox that are exposed, with their URLs and tokens, which is why it takes the scope of exec.
         */
        get: operations["ports_list"];
        put?: never;
        /**
         * Expose Port
         * @description Expose a port at a URL, which it keeps until it is taken back. Exposing it again gives the same.
         */
        post: operations["ports_expose"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/ports/{port}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        post?: never;
        /**
         * Unexpose Port
         * @description Take a URL back, and cut what is under way through it. Does nothing if the port is not exposed.
         */
        delete: operations["ports_unexpose"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Processes
         * @description The commands that were started through the API: those that run, and the last 64 that ended, by number.
         */
        get: operations["processes_list"];
        put?: never;
        /**
         * Spawn Process
         * @description Start a command, and leave it running: it ends by itself, when it is killed, or with its sandbox.
         */
        post: operations["processes_spawn"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Process
         * @description A command that was started through the API.
         */
        get: operations["processes_get"];
        put?: never;
        post?: never;
        /**
         * Kill Process
         * @description Kill a process with all that it started. When this is answered, nothing of it is left.
         */
        delete: operations["processes_kill"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}/output": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Stream Output
         * @description The output of a process from an offset on, while it runs and after. Unset: from the oldest that is kept.
         *
         *     The last 64 KiB of each stream are kept. A client that reads slowly slows the process down, and loses nothing.
         */
        get: operations["processes_output"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}/resize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Resize Process
         * @description Change the size of its terminal. Nothing happens to a process that has none.
         */
        post: operations["processes_resize"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}/signal": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Signal Process
         * @description Send a signal to a process.
         */
        post: operations["processes_signal"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}/stdin": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Write Stdin
         * @description Write the body of the request, as it is, to the input of a process that was spawned with one.
         *
         *     Answered when all of it was taken over: as fast as the process reads, but for the last 64 KiB. Bytes after the end
         *     of the input, or for a process that has ended or closed its input, are dropped. One request at a time writes.
         */
        post: operations["processes_stdin"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/processes/{process}/wait": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Wait For Process
         * @description Wait until a process has ended, or for `timeout_s`: its `exit_code` is then still unset.
         */
        get: operations["processes_wait"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/ps": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List System Processes
         * @description All processes in the sandbox, by their pid.
         */
        get: operations["processes_ps"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/restore": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Restore
         * @description Restore a sandbox to a checkpoint. What was written since is lost, and processes end.
         */
        post: operations["sandboxes_restore"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/resume": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Resume
         * @description Resume a paused sandbox. One that sleeps is refused: wake it.
         */
        post: operations["sandboxes_resume"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/shutdown": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Shutdown
         * @description Put it to sleep until it is woken: using it is refused.
         */
        post: operations["sandboxes_shutdown"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/sleep": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Sleep
         * @description Put it to sleep on disk, until it is next used. The header Atoll-Slept says whether that was done now; if it
         *     would lose processes of one that is unused, that is paused instead.
         */
        post: operations["sandboxes_sleep"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/stats": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Stats
         * @description What it uses now.
         */
        get: operations["sandboxes_stats"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/stats/history": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Stats History
         * @description What it used within the last hour.
         */
        get: operations["sandboxes_stats_history"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/{sandbox}/wake": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Wake
         * @description Start a sandbox that sleeps, was shut down or has ended, and resume a paused one.
         */
        post: operations["sandboxes_wake"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/check": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Check
         * @description Check the options of a sandbox, as far as they can be without creating it. What is wrong is answered as a create
         *     answers it. Secrets are not looked at, and quotas are not asked.
         */
        post: operations["sandboxes_check"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/sandboxes/import": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Import Sandbox
         * @description Create a sandbox from a file that export wrote. Nothing in it is trusted.
         */
        post: operations["sandboxes_import"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/templates": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Templates
         * @description The templates of the tenant, by name. One with a `reason` cannot be read, and only be deleted.
         */
        get: operations["templates_list"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/templates/{template}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One template, with its versions by tag. `default` is the one of those who name none.
         */
        get: operations["templates_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete a template, with all of its tags. Sandboxes that began as it stay, and so do the results of its steps.
         */
        delete: operations["templates_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/templates/{template}/tags/{tag}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        /**
         * Set Tag
         * @description Let a tag mean what another one means now, in place of what it meant.
         */
        put: operations["templates_tag"];
        post?: never;
        /**
         * Remove Tag
         * @description Delete one tag of a template. Without any, it is deleted.
         */
        delete: operations["templates_untag"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/templates/gc": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Gc
         * @description Remove the kept results of steps that no template needs. The next build runs these steps again.
         */
        post: operations["templates_gc"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/tenants": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Tenants
         * @description All tenants, by name.
         */
        get: operations["tenants_list"];
        put?: never;
        /**
         * Create Tenant
         * @description Create a tenant.
         */
        post: operations["tenants_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/tenants/{tenant}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get Tenant
         * @description One tenant.
         */
        get: operations["tenants_get"];
        put?: never;
        post?: never;
        /**
         * Delete Tenant
         * @description Delete a tenant, its keys and what belongs to it.
         */
        delete: operations["tenants_delete"];
        options?: never;
        head?: never;
        /**
         * Update Tenant
         * @description Change a tenant. Its sandboxes keep what they have.
         */
        patch: operations["tenants_update"];
        trace?: never;
    };
    "/api/v1/volumes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Volumes
         * @description The volumes of the tenant, by name.
         */
        get: operations["volumes_list"];
        put?: never;
        /**
         * Create
         * @description Create an empty volume.
         */
        post: operations["volumes_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/volumes/{volume}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One volume. What it occupies is counted now.
         */
        get: operations["volumes_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Remove a volume and its files. One that sandboxes mount is refused.
         */
        delete: operations["volumes_delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/volumes/{volume}/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Export
         * @description The files of a volume, as a tar.
         */
        get: operations["volumes_export"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/volumes/{volume}/import": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Import Volume
         * @description Create a volume with the files of a tar. When it fails, there is no volume.
         */
        post: operations["volumes_import"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/warm-pools": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Pools
         * @description The warm pools of the tenant.
         */
        get: operations["warm_pools_list"];
        /**
         * Set Pool
         * @description Keep sandboxes ready that creates with the same image, limits and runtime claim. It answers when they are.
         */
        put: operations["warm_pools_set"];
        post?: never;
        /**
         * Remove Pools
         * @description Remove all warm pools of the tenant, and their sandboxes.
         */
        delete: operations["warm_pools_remove"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/webhooks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * List Webhooks
         * @description The webhooks of the tenant.
         */
        get: operations["webhooks_list"];
        put?: never;
        /**
         * Create
         * @description Have events sent to a URL.
         */
        post: operations["webhooks_create"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/webhooks/{webhook}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Get
         * @description One webhook, without its secret.
         */
        get: operations["webhooks_get"];
        put?: never;
        post?: never;
        /**
         * Delete
         * @description Delete a webhook and its deliveries.
         */
        delete: operations["webhooks_delete"];
        options?: never;
        head?: never;
        /**
         * Update
         * @description Change a webhook.
         */
        patch: operations["webhooks_update"];
        trace?: never;
    };
    "/api/v1/webhooks/{webhook}/deliveries": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Deliveries
         * @description What was sent, or is to be, the latest first.
         */
        get: operations["webhooks_deliveries"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/v1/webhooks/{webhook}/test": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Test
         * @description Send something of the type `test`. The deliveries tell what became of it.
         */
        post: operations["webhooks_test"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /**
         * AgentBudget
         * @description What an agent may spend. Unset: no limit but the tenant's quota.
         */
        AgentBudget: {
            /**
             * Tokens
             * @description Tokens of all turns of the config together.
             */
            tokens?: number | null;
            /**
             * Turn Steps
             * @description How often the model is asked in one turn.
             */
            turn_steps?: number;
            /**
             * Turn Tokens
             * @description Tokens of the model, in and out, in one turn.
             */
            turn_tokens?: number | null;
        };
        /**
         * AgentConfig
         * @description An agent config of a tenant, in its newest version unless another was asked for.
         */
        AgentConfig: {
            /**
             * Agent Type
             * @description Where its tools run: in the client's program, or in a workspace here.
             * @default client-side
             * @enum {string}
             */
            agent_type: "client-side" | "sandboxed";
            /**
             * @default {
             *       "turn_steps": 50
             *     }
             */
            budget: components["schemas"]["AgentBudget"];
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Id */
            id: string;
            /** @description Unset: the server's own model. */
            model_config?: components["schemas"]["ModelChoice"] | null;
            /**
             * Name
             * @example Site Editor
             */
            name: string;
            /** @description Of a sandboxed agent: what its own tools are in. Unset: it has built-in tools only. */
            provisioning_bundle?: components["schemas"]["ProvisioningBundle"] | null;
            /**
             * System Prompt
             * @description With `{tenant_name}`, `{agent_name}`, `{date}` and the names of `template_vars` as placeholders. Other braces
             *     stay as they are.
             * @default
             */
            system_prompt: string;
            /** Template Vars */
            template_vars?: {
                [key: string]: string;
            };
            /**
             * Tokens Spent
             * @description By all turns of the config.
             * @default 0
             */
            tokens_spent: number;
            /**
             * Tools Config
             * @description The tools that the model may call, by name; those that the client runs also with a description and a schema.
             * @default []
             * @example [
             *       "read_file",
             *       "write_file"
             *     ]
             */
            tools_config: (string | components["schemas"]["ToolDeclaration"])[];
            /**
             * Updated At
             * Format: date-time
             * @description When this version was made.
             */
            updated_at: string;
            /**
             * Version
             * @description Counts up with each change.
             */
            version: number;
            /**
             * Workspace Image
             * @description Unset: the server's default image.
             */
            workspace_image?: string | null;
            /** @description Unset: the tenant's defaults. */
            workspace_limits?: components["schemas"]["Limits"] | null;
            /** @description What its tools may connect to. Unset: nothing. */
            workspace_network?: components["schemas"]["NetworkPolicy"] | null;
            /**
             * Workspace Secret Names
             * @description Of the newest version. The values are written only.
             * @default []
             */
            workspace_secret_names: string[];
        };
        /** ApiKey */
        ApiKey: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Expires At */
            expires_at?: string | null;
            /** Id */
            id: string;
            /** Last Used At */
            last_used_at?: string | null;
            /** Name */
            name: string;
            /** Revoked At */
            revoked_at?: string | null;
            /**
             * Role
             * @enum {string}
             */
            role: "admin" | "member";
            /** Scopes */
            scopes: ("sandboxes:read" | "sandboxes:write" | "sandboxes:exec" | "volumes" | "images" | "bundles" | "agents:read" | "agents:write" | "chat" | "webhooks" | "audit" | "keys" | "tenants")[];
            /** Tenant */
            tenant: string | null;
        };
        /**
         * ApprovalBody
         * @description A call of a tool that waits for an approval.
         */
        ApprovalBody: {
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
            /**
             * Asked At
             * Format: date-time
             */
            asked_at: string;
            /**
             * Code
             * @description The code that makes the call.
             */
            code: string;
            /** Id */
            id: string;
            /** Sandbox */
            sandbox: string;
            /** Session */
            session: string;
            /** Tool */
            tool: string;
        };
        /**
         * ArgStep
         * @description Declare a build argument: a variable of the steps after it alone.
         */
        ArgStep: {
            /** Default */
            default?: string | null;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "arg";
            /** Name */
            name: string;
        };
        /**
         * AuditEvent
         * @description One thing that was done, or refused. It holds nothing secret: a caller leaves values out.
         */
        AuditEvent: {
            /** Action */
            action: string;
            /** Client */
            client?: string | null;
            /** Details */
            details?: {
                [key: string]: string;
            };
            /**
             * Id
             * @default 0
             */
            id: number;
            /** Key */
            key?: string | null;
            /** Key Name */
            key_name?: string | null;
            /** Request Id */
            request_id: string;
            /** Resource */
            resource?: string | null;
            /** Status */
            status: number;
            /** Tenant */
            tenant?: string | null;
            /**
             * Time
             * Format: date-time
             */
            time?: string;
        };
        /**
         * AuditRecord
         * @description A connection that a program in a sandbox asked for; with plain HTTP, a request.
         */
        AuditRecord: {
            /** Address */
            address?: string | null;
            /** Ended */
            ended?: string | null;
            /** Host */
            host: string;
            /** Id */
            id: string;
            /** Port */
            port?: number | null;
            /**
             * Protocol
             * @enum {string}
             */
            protocol: "http" | "connect" | "socks";
            /** Reason */
            reason?: string | null;
            /**
             * Received Bytes
             * @default 0
             */
            received_bytes: number;
            /** Sandbox */
            sandbox: string;
            /**
             * Sent Bytes
             * @default 0
             */
            sent_bytes: number;
            /**
             * Time
             * Format: date-time
             */
            time: string;
            /**
             * Verdict
             * @enum {string}
             */
            verdict: "allowed" | "denied" | "failed";
        };
        /**
         * Build
         * @description A build of a template by a server, as far as it has come.
         */
        Build: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Ended At */
            ended_at?: string | null;
            /** Failed Step */
            failed_step?: number | null;
            /** Id */
            id: string;
            /** Reason */
            reason?: string | null;
            /**
             * Status
             * @enum {string}
             */
            status: "waiting" | "building" | "ready" | "failed" | "cancelled" | "interrupted";
            /**
             * Step
             * @default 0
             */
            step: number;
            /**
             * Steps
             * @default 0
             */
            steps: number;
            /** Tags */
            tags: string[];
            /** Template */
            template: string;
            version?: components["schemas"]["TemplateVersion"] | null;
        };
        /**
         * BuildLogLine
         * @description A line of a build's log.
         */
        BuildLogLine: {
            /**
             * At
             * Format: date-time
             */
            at: string;
            /**
             * Kind
             * @enum {string}
             */
            kind: "step" | "cached" | "output" | "note";
            /**
             * Level
             * @enum {string}
             */
            level: "info" | "error";
            /** Number */
            number: number;
            /** Step */
            step: number;
            /** Text */
            text: string;
        };
        /**
         * BuildPlan
         * @description A build. The first user and directory are those of the steps before the first that names others.
         */
        BuildPlan: {
            /**
             * Arguments
             * @description Values of build arguments.
             */
            arguments?: {
                [key: string]: string;
            };
            /** First Cwd */
            first_cwd?: string;
            /** First User */
            first_user?: string;
            /**
             * Image
             * @description The base. With `template:` it is another template. Unset: the engine's default image.
             */
            image?: string | null;
            /** Ready Command */
            ready_command?: string[];
            /** Start Command */
            start_command?: string[];
            /** Steps */
            steps?: (components["schemas"]["RunStep"] | components["schemas"]["CopyStep"] | components["schemas"]["WorkdirStep"] | components["schemas"]["UserStep"] | components["schemas"]["EnvStep"] | components["schemas"]["ArgStep"])[];
            /**
             * User
             * @description Of sandboxes, if no step names one. Unset: the base's.
             */
            user?: string | null;
        };
        /**
         * BuildRequest
         * @description A build of a template: of a plan, or of a Dockerfile.
         */
        BuildRequest: {
            /**
             * Arguments
             * @description Of a Dockerfile: values of its build arguments.
             */
            arguments?: {
                [key: string]: string;
            };
            /**
             * Cache
             * @description False: every step is run, also those whose results are kept.
             */
            cache?: boolean;
            /**
             * Dockerfile
             * @description The text of a Dockerfile. Either this or `plan` is given.
             * @example FROM host
             *     RUN true
             */
            dockerfile?: string | null;
            /**
             * Files
             * @description Of a Dockerfile: what the archive with the files of its COPY and ADD is called, which was uploaded.
             */
            files?: string | null;
            /** @description Of the steps, and of the template's sandboxes that name no others. */
            limits?: components["schemas"]["Limits"] | null;
            /**
             * Name
             * @description What the template is called: sandboxes begin as it with the image `template:NAME`.
             * @example web
             */
            name: string;
            /** @description Of the steps. Unset: no connection leaves one. */
            network?: components["schemas"]["NetworkPolicy"] | null;
            /** @description Steps. Either this or `dockerfile` is given. */
            plan?: components["schemas"]["BuildPlan"] | null;
            /**
             * Ready Command
             * @description Of a Dockerfile: a program that succeeds once its start command is ready. A create waits for it.
             */
            ready_command?: string[];
            /** Runtime */
            runtime?: string | null;
            /**
             * Step Timeout S
             * @description How long a step may take. Unset: 30 minutes.
             */
            step_timeout_s?: number | null;
            /**
             * Sudo
             * @description Whether `sudo` works in steps of `user`, or of the base image's own user. Sandboxes from the template have it
             *     if they are created with it.
             */
            sudo?: boolean;
            /** Tags */
            tags?: string[];
        };
        /**
         * BundleManifest
         * @description What a bundle declares.
         */
        BundleManifest: {
            /** Build Command */
            build_command?: string | null;
            /**
             * Node Modules
             * @default []
             */
            node_modules: string[];
            /**
             * Requirements
             * @default []
             */
            requirements: string[];
            /**
             * Schema Version
             * @constant
             */
            schema_version: 1;
            /** Tools */
            tools: components["schemas"]["ManifestTool"][];
        };
        /**
         * CallBody
         * @description A call that waits for the client.
         */
        CallBody: {
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
            /** Id */
            id: string;
            /** Tool */
            tool: string;
        };
        /**
         * CallRecord
         * @description One call of a tool by code.
         */
        CallRecord: {
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
            /** Duration S */
            duration_s: number;
            /** Error */
            error?: string | null;
            /** Result Bytes */
            result_bytes: number;
            /**
             * Started At
             * Format: date-time
             */
            started_at: string;
            /** Tool */
            tool: string;
        };
        /**
         * CallResult
         * @description The result of a call: `value`, or `error`.
         */
        CallResult: {
            /**
             * Error
             * @description Why it failed; the code gets an exception with this message.
             */
            error?: string | null;
            /** Id */
            id: string;
            /** Value */
            value?: unknown;
        };
        /**
         * Capabilities
         * @description What a runtime on this machine can do. What is false is not offered, and refused when it is requested.
         */
        Capabilities: {
            /** Chosen By Default */
            chosen_by_default: boolean;
            /** Cpu Limit */
            cpu_limit: boolean;
            /** Disk Limit */
            disk_limit: boolean;
            /** Freeze */
            freeze: boolean;
            /** Id Range */
            id_range: boolean;
            /** Memory Checkpoint */
            memory_checkpoint: boolean;
            /** Memory Limit */
            memory_limit: boolean;
            /**
             * Mounts
             * @default false
             */
            mounts: boolean;
            /** Pids Limit */
            pids_limit: boolean;
            /** Process Oom */
            process_oom: boolean;
            /** Saves Epoll Waiters */
            saves_epoll_waiters: boolean;
            /**
             * Several Users
             * @default true
             */
            several_users: boolean;
            /**
             * Sudo
             * @default false
             */
            sudo: boolean;
            /** Terminal Keys */
            terminal_keys: boolean;
        };
        /**
         * ChatAnswer
         * @description What a client is answered: the agent's text, or the calls that it is to make.
         */
        ChatAnswer: {
            /** Conversation Id */
            conversation_id: string;
            /** Response */
            response: string | null;
            /** Steps */
            steps: number;
            /** Tool Calls */
            tool_calls: components["schemas"]["ChatToolCall"][];
            /** Turn Id */
            turn_id: string;
            usage: components["schemas"]["Tokens"];
            /** Version */
            version: number;
        };
        /**
         * ChatBody
         * @description A message, the results that the agent waits for, or `resume`.
         */
        ChatBody: {
            /**
             * Conversation Id
             * @description Unset: a new conversation.
             */
            conversation_id?: string | null;
            /**
             * Message
             * @example Hello!
             */
            message?: string | null;
            /**
             * Resume
             * @description Go on with a turn that failed, was cancelled or interrupted, where it ended.
             */
            resume?: boolean;
            /** Tool Results */
            tool_results?: components["schemas"]["ToolResultInput"][] | null;
        };
        /**
         * ChatMessage
         * @description A message of a conversation.
         */
        ChatMessage: {
            /** Content */
            content?: string | null;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Id */
            id: number;
            /** Name */
            name?: string | null;
            /** Outcome */
            outcome?: string | null;
            /**
             * Role
             * @enum {string}
             */
            role: "user" | "assistant" | "tool";
            /** Tool Call Id */
            tool_call_id?: string | null;
            /**
             * Tool Calls
             * @default []
             */
            tool_calls: components["schemas"]["ChatToolCall"][];
            /** Turn Id */
            turn_id: string;
        };
        /**
         * ChatToolCall
         * @description A call of a tool that the client is to make.
         */
        ChatToolCall: {
            /** Arguments */
            arguments: {
                [key: string]: unknown;
            };
            /** Id */
            id: string;
            /** Name */
            name: string;
        };
        /**
         * ChatTurn
         * @description A turn of a conversation.
         */
        ChatTurn: {
            /** Config Id */
            config_id: string;
            /** Conversation Id */
            conversation_id: string;
            /** Ended At */
            ended_at?: string | null;
            /** Error */
            error?: {
                [key: string]: unknown;
            } | null;
            /** Id */
            id: string;
            /** Response */
            response?: string | null;
            /**
             * Started At
             * Format: date-time
             */
            started_at: string;
            /**
             * Status
             * @enum {string}
             */
            status: "running" | "waiting" | "done" | "failed" | "cancelled" | "interrupted";
            /** Steps */
            steps: number;
            /**
             * Tool Calls
             * @default []
             */
            tool_calls: components["schemas"]["ChatToolCall"][];
            usage: components["schemas"]["Tokens"];
            /** Version */
            version: number;
        };
        /**
         * Checkpoint
         * @description A sandbox as it was at one moment, to restore it or to fork others from.
         */
        Checkpoint: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Id */
            id: string;
            /** Image */
            image: string;
            /** Label */
            label?: string | null;
            /** Parent */
            parent?: string | null;
            /** Reason */
            reason?: string | null;
            /** Runtime */
            runtime: string;
            /** Sandbox */
            sandbox: string;
            /** Sandbox Id */
            sandbox_id: string;
            /** Size Bytes */
            size_bytes?: number | null;
            /** With Memory */
            with_memory: boolean;
            /**
             * Without Mounts
             * @default []
             */
            without_mounts: string[];
        };
        /** CheckpointCreate */
        CheckpointCreate: {
            /**
             * Label
             * @description Unique among the checkpoints of the sandbox. Unset: it is found by its id only.
             */
            label?: string | null;
            /**
             * Move
             * @description Take the label from the checkpoint that has it.
             */
            move?: boolean;
        };
        /** ChmodBody */
        ChmodBody: {
            /** Mode */
            mode: number;
            /**
             * Path
             * @description A relative path begins where commands start.
             */
            path?: string | null;
            /**
             * Path Base64
             * @description The bytes of the path, where they are no UTF-8, instead of `path`.
             */
            path_base64?: string | null;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /** ChownBody */
        ChownBody: {
            /**
             * Owner
             * @description NAME, UID or UID:GID. The kernel lets only root do this: `"user": "root"`.
             */
            owner: string;
            /**
             * Path
             * @description A relative path begins where commands start.
             */
            path?: string | null;
            /**
             * Path Base64
             * @description The bytes of the path, where they are no UTF-8, instead of `path`.
             */
            path_base64?: string | null;
            /** Recursive */
            recursive?: boolean;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /**
         * CodeFile
         * @description A file that code has left in the directory `outbox` of its working directory, where it can be read.
         */
        CodeFile: {
            /**
             * Path
             * @description Relative to the outbox.
             */
            path: string;
            /** Size Bytes */
            size_bytes: number;
        };
        /**
         * ConfigCreate
         * @description A new agent config.
         */
        ConfigCreate: {
            /**
             * Agent Type
             * @description Where its tools run: in the client's program, or in a workspace here.
             * @enum {string}
             */
            agent_type?: "client-side" | "sandboxed";
            budget?: components["schemas"]["AgentBudget"];
            /** @description Unset: the server's own model. */
            model_config?: components["schemas"]["ModelChoice"] | null;
            /**
             * Name
             * @example Site Editor
             */
            name: string;
            /** @description Of a sandboxed agent: what its own tools are in. Unset: it has built-in tools only. */
            provisioning_bundle?: components["schemas"]["ProvisioningBundle"] | null;
            /**
             * System Prompt
             * @description With `{tenant_name}`, `{agent_name}`, `{date}` and the names of `template_vars` as placeholders. Other braces
             *     stay as they are.
             */
            system_prompt?: string;
            /** Template Vars */
            template_vars?: {
                [key: string]: string;
            };
            /**
             * Tools Config
             * @description The tools that the model may call, by name; those that the client runs also with a description and a schema.
             * @example [
             *       "read_file",
             *       "write_file"
             *     ]
             */
            tools_config?: (string | components["schemas"]["ToolDeclaration"])[];
            /**
             * Workspace Image
             * @description Unset: the server's default image.
             */
            workspace_image?: string | null;
            /** @description Unset: the tenant's defaults. */
            workspace_limits?: components["schemas"]["Limits"] | null;
            /** @description What its tools may connect to. Unset: nothing. */
            workspace_network?: components["schemas"]["NetworkPolicy"] | null;
            /**
             * Workspace Secrets
             * @description By the variable. A value is seen by tools in clear; with `hosts`, they have a placeholder instead, which is
             *     replaced in requests to these only. Written only: no answer shows them.
             */
            workspace_secrets?: {
                [key: string]: string | components["schemas"]["SecretInput"];
            };
        };
        /**
         * ConfigUpdate
         * @description What is left out stays as it is; what is given is replaced as a whole, but for secrets.
         */
        ConfigUpdate: {
            /**
             * Agent Type
             * @enum {string}
             */
            agent_type?: "client-side" | "sandboxed";
            budget?: components["schemas"]["AgentBudget"] | null;
            /** @description Null: the server's own model. */
            model_config?: components["schemas"]["ModelChoice"] | null;
            /** Name */
            name?: string;
            /** @description Null: none. */
            provisioning_bundle?: components["schemas"]["ProvisioningBundle"] | null;
            /** System Prompt */
            system_prompt?: string;
            /** Template Vars */
            template_vars?: {
                [key: string]: string;
            } | null;
            /** Tools Config */
            tools_config?: (string | components["schemas"]["ToolDeclaration"])[] | null;
            /**
             * Version
             * @description The version that the client knows. If there is a newer one, nothing is changed (409).
             */
            version?: number | null;
            /** Workspace Image */
            workspace_image?: string | null;
            workspace_limits?: components["schemas"]["Limits"] | null;
            workspace_network?: components["schemas"]["NetworkPolicy"] | null;
            /**
             * Workspace Secrets
             * @description Set; null removes one. Those that are left out stay.
             */
            workspace_secrets?: {
                [key: string]: string | components["schemas"]["SecretInput"] | null;
            };
        };
        /**
         * Conversation
         * @description A conversation with an agent.
         */
        Conversation: {
            /** Config Id */
            config_id: string;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Id */
            id: string;
            /** Status */
            status: ("running" | "waiting" | "done" | "failed" | "cancelled" | "interrupted") | null;
            /**
             * Updated At
             * Format: date-time
             */
            updated_at: string;
        };
        /**
         * ConversationBody
         * @description A conversation, with a page of its messages.
         */
        ConversationBody: {
            conversation: components["schemas"]["Conversation"];
            /** Messages */
            messages: components["schemas"]["ChatMessage"][];
            /** Next */
            next: string | null;
            /** Turns */
            turns: components["schemas"]["ChatTurn"][];
        };
        /**
         * CopyStep
         * @description Copy files of an archive.
         */
        CopyStep: {
            /**
             * Archive
             * @description What the archive is called: where the builder is given its bytes (`ArchiveSource`).
             */
            archive: string;
            /**
             * Are Patterns
             * @description The sources are patterns of names: `*`, `?` and `[…]` within a name, `**` any number of directories.
             */
            are_patterns?: boolean;
            /** Destination */
            destination: string;
            /** Force */
            force?: boolean;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "copy";
            /** Mode */
            mode?: string | null;
            /** Owned By User */
            owned_by_user?: boolean;
            /**
             * Owner
             * @description `USER` or `USER:GROUP`. Unset: root; with `owned_by_user`, the user of the steps before.
             */
            owner?: string | null;
            /** Shown */
            shown?: string;
            /**
             * Sources
             * @description Names in the archive, relative to its root.
             */
            sources: string[];
        };
        /** DecisionBody */
        DecisionBody: {
            /** Allowed */
            allowed: boolean;
            /**
             * Arguments
             * @description The arguments to use instead. Unset: those of the code.
             */
            arguments?: {
                [key: string]: unknown;
            } | null;
            /**
             * Reason
             * @description Why not; the code sees it.
             */
            reason?: string;
        };
        /**
         * EntryBody
         * @description A file in a list.
         */
        EntryBody: {
            /** Gid */
            gid: number;
            /**
             * Kind
             * @enum {string}
             */
            kind: "file" | "directory" | "symlink" | "fifo" | "socket" | "char_device" | "block_device";
            /**
             * Mode
             * @description Permission bits, with set-id and sticky, as a number: 420 is 0644.
             */
            mode: number;
            /**
             * Mtime
             * Format: date-time
             */
            mtime: string;
            /**
             * Name
             * @description Relative to the directory that was listed, or searched.
             */
            name: string;
            /**
             * Name Base64
             * @description Its bytes, where they are no UTF-8.
             */
            name_base64?: string | null;
            /** Size */
            size: number;
            /**
             * Target
             * @description The target of a symlink. Unset: it is not a symlink.
             */
            target?: string | null;
            /**
             * Target Base64
             * @description Its bytes, where they are no UTF-8.
             */
            target_base64?: string | null;
            /** Uid */
            uid: number;
        };
        /** EntryList */
        EntryList: {
            /** Items */
            items: components["schemas"]["EntryBody"][];
            /**
             * Next
             * @description The `after` of the next page. Unset: these are the last.
             */
            next?: string | null;
        };
        /**
         * EnvStep
         * @description Set variables, for the steps after it and for sandboxes of the template.
         */
        EnvStep: {
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "env";
            /** Variables */
            variables: {
                [key: string]: string;
            };
        };
        /**
         * Error
         * @description The body of every answer that is an error.
         */
        ErrorBody: {
            /**
             * Code
             * @example sandbox_not_found
             */
            code: string;
            /**
             * Details
             * @example {
             *       "name": "demo"
             *     }
             */
            details: {
                [key: string]: unknown;
            };
            /**
             * Message
             * @example no sandbox has the name or id 'demo'
             */
            message: string;
            /**
             * Request Id
             * @example req_0c8b4dd0f4a74b66
             */
            request_id: string;
        };
        /**
         * ExecBody
         * @description A command to be run to its end.
         */
        ExecBody: {
            /**
             * Command
             * @description A string is a line for the shell, a list a program and its arguments.
             */
            command: string | string[];
            /**
             * Cwd
             * @description The working directory. Unset: the sandbox's own, else the user's home.
             */
            cwd?: string | null;
            /**
             * Encoding
             * @description Of stdout and stderr in the answer. As text, a byte that is no UTF-8 is U+FFFD.
             * @enum {string}
             */
            encoding?: "text" | "base64";
            /**
             * Env
             * @description Variables on top of the sandbox's environment.
             */
            env?: {
                [key: string]: string;
            } | null;
            /**
             * Merge Stderr
             * @description True: stderr is part of stdout, in the order of writing.
             */
            merge_stderr?: boolean;
            /**
             * Output Limit Bytes
             * @description What is kept of stdout and of stderr, head and tail. Events have all of the output, whatever this is.
             */
            output_limit_bytes?: number;
            /**
             * Stdin
             * @description Its input, as text. Unset: it is empty.
             */
            stdin?: string | null;
            /**
             * Stdin Base64
             * @description Its input, as bytes, instead of `stdin`.
             */
            stdin_base64?: string | null;
            /**
             * Timeout S
             * @description It is killed with all that it started if it has not ended after so long. Unset: no limit.
             */
            timeout_s?: number | null;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /**
         * ExecResult
         * @description How a command ended, and its output as text: UTF-8, with U+FFFD for an invalid byte.
         *
         *     Where `stdout_truncation` is set, `stdout` is the head, one line that says how much was left out, and the tail.
         */
        ExecResult: {
            /** Duration S */
            duration_s: number;
            /** Exit Code */
            exit_code: number;
            /**
             * Out Of Memory
             * @default false
             */
            out_of_memory: boolean;
            /** Signal */
            signal?: number | null;
            /** Stderr */
            stderr: string;
            stderr_truncation?: components["schemas"]["Truncation"] | null;
            /** Stdout */
            stdout: string;
            stdout_truncation?: components["schemas"]["Truncation"] | null;
            /**
             * Timed Out
             * @default false
             */
            timed_out: boolean;
        };
        /** ExecuteBody */
        ExecuteBody: {
            /** Code */
            code: string;
            /**
             * Timeout S
             * @description Unset: that of the session.
             */
            timeout_s?: number | null;
        };
        /**
         * ExecutionBody
         * @description An execution.
         */
        ExecutionBody: {
            /**
             * Approvals
             * @description The ids of approvals that it waits for.
             */
            approvals: string[];
            /** Calls */
            calls: components["schemas"]["CallBody"][];
            /** Id */
            id: string;
            /** @description Set when it has ended. */
            result: components["schemas"]["ResultBody"] | null;
            /** Session */
            session: string;
            /**
             * Status
             * @description `waiting`: it goes on when the client has sent the results of `calls`, or an approval was decided.
             * @enum {string}
             */
            status: "running" | "waiting" | "ended";
        };
        /**
         * ExecutionFailure
         * @description Why an execution ended early.
         */
        ExecutionFailure: {
            /** Line */
            line?: number | null;
            /** Message */
            message: string;
            /**
             * Traceback
             * @default
             */
            traceback: string;
            /** Type */
            type: string;
        };
        /** FoundContents */
        FoundContents: {
            contents: components["schemas"]["ImageContents"] | null;
        };
        /**
         * GcResult
         * @description What `gc` removed.
         */
        GcResult: {
            /**
             * Downloads
             * @default []
             */
            downloads: string[];
            /**
             * Images
             * @default []
             */
            images: string[];
            /**
             * Layers
             * @default []
             */
            layers: string[];
            /**
             * Sandboxes
             * @default []
             */
            sandboxes: string[];
        };
        /**
         * HostFacts
         * @description What sandboxes of this server have, and may have.
         */
        HostFacts: {
            /** Image */
            image: string;
            /** Runtime */
            runtime: string | null;
            /** Runtimes */
            runtimes: components["schemas"]["UsableRuntime"][];
            /** Tenant */
            tenant: string;
            /** Version */
            version: string;
        };
        /**
         * ImageContents
         * @description What an image has.
         */
        ImageContents: {
            /** Os */
            os: string | null;
            /** Programs */
            programs: string[];
            /** User */
            user?: string | null;
            /** Working Directory */
            working_directory?: string | null;
        };
        /**
         * ImageInfo
         * @description An image that is present.
         */
        ImageInfo: {
            /** Command */
            command?: string[] | null;
            /** Created At */
            created_at?: string | null;
            /** Digest */
            digest: string;
            /** Entrypoint */
            entrypoint?: string[] | null;
            /** Env */
            env?: {
                [key: string]: string;
            };
            /** Kind */
            kind: ("host" | "registry" | "template") | ("dir" | "tar" | "oci" | "oci-archive" | "docker-archive");
            /**
             * Pulled At
             * Format: date-time
             */
            pulled_at: string;
            /** Reference */
            reference: string;
            /** Size Bytes */
            size_bytes: number;
            /** User */
            user?: string | null;
            /** Working Directory */
            working_directory?: string | null;
        };
        /** ImagePart */
        ImagePart: {
            /** Data */
            data: string;
            /** Mime Type */
            mime_type: string;
            /**
             * Type
             * @default image
             * @constant
             */
            type: "image";
        };
        /** ImagePull */
        ImagePull: {
            /**
             * Reference
             * @example python:3.12
             */
            reference: string;
        };
        /** KeyCreate */
        KeyCreate: {
            /**
             * Name
             * @example ci
             */
            name: string;
            /**
             * Role
             * @enum {string}
             */
            role?: "admin" | "member";
            /**
             * Scopes
             * @description Unset: all that the role has.
             */
            scopes?: ("sandboxes:read" | "sandboxes:write" | "sandboxes:exec" | "volumes" | "images" | "bundles" | "agents:read" | "agents:write" | "chat" | "webhooks" | "audit" | "keys" | "tenants")[] | null;
            /**
             * Server
             * @description A key of the server itself, which may act in every tenant; for keys of the server only.
             */
            server?: boolean;
            /**
             * Ttl S
             * @description When it expires. Unset: never.
             */
            ttl_s?: number | null;
        };
        /**
         * Limits
         * @description What a sandbox may use. A limit that is set is enforced, or the create is refused.
         */
        Limits: {
            /** Cpus */
            cpus?: number | null;
            /** Disk Bytes */
            disk_bytes?: number | null;
            /** Memory Bytes */
            memory_bytes?: number | null;
            /** Open Files */
            open_files?: number | null;
            /** Pids */
            pids?: number | null;
        };
        /**
         * ManifestTool
         * @description A tool of a bundle.
         */
        ManifestTool: {
            /** Description */
            description?: string | null;
            /** Entrypoint */
            entrypoint: string;
            /** Input Schema */
            input_schema?: {
                [key: string]: unknown;
            } | null;
            /** Name */
            name: string;
        };
        /**
         * MatchBody
         * @description A line that was found.
         */
        MatchBody: {
            /**
             * After
             * @default []
             */
            after: string[];
            /**
             * Before
             * @default []
             */
            before: string[];
            /**
             * Line
             * @description From 1.
             */
            line: number;
            /** Path */
            path: string;
            /**
             * Path Base64
             * @description Its bytes, where they are no UTF-8.
             */
            path_base64?: string | null;
            /**
             * Text
             * @description At most 4096 bytes of it.
             */
            text: string;
        };
        /** MatchList */
        MatchList: {
            /** Items */
            items: components["schemas"]["MatchBody"][];
            /**
             * Next
             * @description Always unset: a larger `limit` finds more.
             */
            next?: string | null;
        };
        /**
         * Me
         * @description Who sent the request, and what may be done with it.
         */
        Me: {
            key: components["schemas"]["ApiKey"];
            tenant: components["schemas"]["Tenant"];
            /** Usage */
            usage: {
                [key: string]: number;
            };
        };
        /**
         * MediaPart
         * @description Something to see, hear or read that only some models take: the others are given its text.
         */
        MediaPart: {
            /**
             * Kind
             * @enum {string}
             */
            kind: "image" | "audio" | "video" | "document";
            /**
             * Type
             * @default media
             * @constant
             */
            type: "media";
            /** Url */
            url: string;
        };
        /** MkdirBody */
        MkdirBody: {
            /** Mode */
            mode?: number | null;
            /**
             * Parents
             * @description Make the directories above it too, and accept one that exists.
             */
            parents?: boolean;
            /**
             * Path
             * @description A relative path begins where commands start.
             */
            path?: string | null;
            /**
             * Path Base64
             * @description The bytes of the path, where they are no UTF-8, instead of `path`.
             */
            path_base64?: string | null;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /**
         * ModelChoice
         * @description The model of an agent.
         */
        ModelChoice: {
            /**
             * Max Tokens
             * @description Of one answer. Unset: what the provider allows.
             */
            max_tokens?: number | null;
            /**
             * Model
             * @example claude-sonnet-5-5
             */
            model: string;
            /**
             * Provider
             * @description `anthropic`, `bedrock`, `openai`, … as the operator allows them.
             * @example anthropic
             */
            provider: string;
            /** Temperature */
            temperature?: number | null;
        };
        /**
         * Mount
         * @description A directory of the host, or a volume, that a sandbox sees at `target`. Its files are not in checkpoints.
         *
         *     Outside, what the sandbox's user writes belongs to the owner of the directory, and the owner's files belong to that
         *     user inside. Files of all other users of the host have no owner inside: they can be read if everyone may.
         */
        Mount: {
            /** Read Only */
            read_only?: boolean | null;
            /** Source */
            source: string;
            /** Target */
            target: string;
        };
        /**
         * NetworkPolicy
         * @description The network connections that a sandbox may make. What no rule allows is refused.
         */
        NetworkPolicy: {
            /** Allow */
            allow?: string[] | string;
            /** Deny */
            deny?: string[] | string;
        };
        /** NewKey */
        NewKey: {
            key: components["schemas"]["ApiKey"];
            /** Text */
            text: string | null;
        };
        /** NewWebhook */
        NewWebhook: {
            /** Secret */
            secret: string | null;
            webhook: components["schemas"]["Webhook"];
        };
        /** AgentConfigPage */
        Page_AgentConfig_: {
            /** Items */
            items: components["schemas"]["AgentConfig"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** ApiKeyPage */
        Page_ApiKey_: {
            /** Items */
            items: components["schemas"]["ApiKey"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** ApprovalBodyPage */
        Page_ApprovalBody_: {
            /** Items */
            items: components["schemas"]["ApprovalBody"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** AuditEventPage */
        Page_AuditEvent_: {
            /** Items */
            items: components["schemas"]["AuditEvent"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** AuditRecordPage */
        Page_AuditRecord_: {
            /** Items */
            items: components["schemas"]["AuditRecord"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** BuildPage */
        Page_Build_: {
            /** Items */
            items: components["schemas"]["Build"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** BuildLogLinePage */
        Page_BuildLogLine_: {
            /** Items */
            items: components["schemas"]["BuildLogLine"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** CheckpointPage */
        Page_Checkpoint_: {
            /** Items */
            items: components["schemas"]["Checkpoint"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** ConversationPage */
        Page_Conversation_: {
            /** Items */
            items: components["schemas"]["Conversation"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** ImageInfoPage */
        Page_ImageInfo_: {
            /** Items */
            items: components["schemas"]["ImageInfo"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** PreviewPage */
        Page_Preview_: {
            /** Items */
            items: components["schemas"]["Preview"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** ProcessInfoPage */
        Page_ProcessInfo_: {
            /** Items */
            items: components["schemas"]["ProcessInfo"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** SandboxInfoPage */
        Page_SandboxInfo_: {
            /** Items */
            items: components["schemas"]["SandboxInfo"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** SessionBodyPage */
        Page_SessionBody_: {
            /** Items */
            items: components["schemas"]["SessionBody"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** StoredBundlePage */
        Page_StoredBundle_: {
            /** Items */
            items: components["schemas"]["StoredBundle"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** SystemProcessPage */
        Page_SystemProcess_: {
            /** Items */
            items: components["schemas"]["SystemProcess"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** TemplatePage */
        Page_Template_: {
            /** Items */
            items: components["schemas"]["Template"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** TenantPage */
        Page_Tenant_: {
            /** Items */
            items: components["schemas"]["Tenant"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** VolumePage */
        Page_Volume_: {
            /** Items */
            items: components["schemas"]["Volume"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** WarmPoolPage */
        Page_WarmPool_: {
            /** Items */
            items: components["schemas"]["WarmPool"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** WebhookPage */
        Page_Webhook_: {
            /** Items */
            items: components["schemas"]["Webhook"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** WebhookDeliveryPage */
        Page_WebhookDelivery_: {
            /** Items */
            items: components["schemas"]["WebhookDelivery"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** WorkspaceInstancePage */
        Page_WorkspaceInstance_: {
            /** Items */
            items: components["schemas"]["WorkspaceInstance"][];
            /**
             * Next
             * @description The cursor of the next page, for `after`. Null: this is the last one.
             */
            next: string | null;
        };
        /** PortExpose */
        PortExpose: {
            /**
             * Port
             * @description The port inside.
             * @example 8000
             */
            port: number;
            /**
             * Wait S
             * @description How long to wait until something listens there. 0: not at all.
             */
            wait_s?: number;
        };
        /**
         * Preview
         * @description A port of a sandbox that clients of the host can reach. It ends with the process that serves it.
         */
        Preview: {
            /** Path Url */
            path_url: string;
            /** Port */
            port: number;
            /** Sandbox */
            sandbox: string;
            /** Token */
            token: string;
            /** Url */
            url: string;
        };
        /**
         * ProcessInfo
         * @description A command that was started through the API, running or recently ended.
         */
        ProcessInfo: {
            /** Command */
            command: string;
            /** Ended At */
            ended_at?: string | null;
            /** Exit Code */
            exit_code?: number | null;
            /** Id */
            id: number;
            /** Live */
            live: boolean;
            /** Pid */
            pid: number;
            /**
             * Started At
             * Format: date-time
             */
            started_at: string;
            /** Stderr Total */
            stderr_total: number;
            /** Stdout Total */
            stdout_total: number;
            /** Uid */
            uid: number;
        };
        /**
         * ProvisioningBundle
         * @description The tool bundle of a sandboxed agent, as its upload was answered.
         */
        ProvisioningBundle: {
            /** Sha256 */
            sha256: string;
            /**
             * Url
             * @description `nap-bundle://<bundle_id>`.
             * @example nap-bundle://bdl_0c8b4dd0f4a74b66
             */
            url: string;
        };
        /**
         * Quotas
         * @description What the sandboxes of a tenant may use together. Unset: no limit.
         *
         *     Memory, CPUs and disk are sums of limits, not of what is used at a moment, so that what was granted can be used.
         *     Sandboxes that sleep or are shut down count as those that run: any use wakes one. Warm pools count as the sandboxes
         *     that they keep ready, and volumes, tool bundles and what was built of these with their size for `disk_bytes`.
         */
        Quotas: {
            /** Cpus */
            cpus?: number | null;
            /** Disk Bytes */
            disk_bytes?: number | null;
            /** Memory Bytes */
            memory_bytes?: number | null;
            /** Model Tokens */
            model_tokens?: number | null;
            /** Requests Per Minute */
            requests_per_minute?: number | null;
            /** Sandboxes */
            sandboxes?: number | null;
        };
        /** RemovedResults */
        RemovedResults: {
            /** Removed */
            removed: string[];
        };
        /** RenameBody */
        RenameBody: {
            /**
             * Parents
             * @description Make the directories above the target.
             */
            parents?: boolean;
            /**
             * Path
             * @description A relative path begins where commands start.
             */
            path?: string | null;
            /**
             * Path Base64
             * @description The bytes of the path, where they are no UTF-8, instead of `path`.
             */
            path_base64?: string | null;
            /** Target */
            target?: string | null;
            /**
             * Target Base64
             * @description The bytes of the target, where they are no UTF-8, instead of `target`.
             */
            target_base64?: string | null;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /**
         * ResultBody
         * @description What became of an execution. Everything in it comes from the code.
         */
        ResultBody: {
            /** Calls */
            calls: components["schemas"]["CallRecord"][];
            /** Duration S */
            duration_s: number;
            error: components["schemas"]["ExecutionFailure"] | null;
            /** Files */
            files: components["schemas"]["CodeFile"][];
            /** Out Of Memory */
            out_of_memory: boolean;
            /**
             * Output
             * @description stdout.
             */
            output: string;
            /**
             * Output File
             * @description Where in the sandbox the whole of stdout is, if `output` is not all of it.
             */
            output_file: string | null;
            /**
             * Parts
             * @description What was displayed; the value of the last line, if there is one, has the role `value`.
             */
            parts: components["schemas"]["RichPart"][];
            /**
             * Session Replaced
             * @description True: its process is gone, and with it the variables. Files are there.
             */
            session_replaced: boolean;
            /** Stderr */
            stderr: string;
            /** Success */
            success: boolean;
            /** Timed Out */
            timed_out: boolean;
            /** Warnings */
            warnings: string[];
        };
        /**
         * ResultLink
         * @description A URL in a result that a client can open.
         */
        ResultLink: {
            /** Name */
            name: string;
            /** Url */
            url: string;
        };
        /**
         * ResultPart
         * @description A part of a result: text, or a URL (`http(s):` or `data:` with base64). Models that see are shown images.
         */
        ResultPart: {
            /**
             * Content
             * @description Of the kind `text`.
             */
            content?: string | null;
            /**
             * Kind
             * @enum {string}
             */
            kind: "text" | "image-url" | "audio-url" | "video-url" | "document-url" | "web-url" | "api-url";
            /**
             * Url
             * @description Of the other kinds.
             */
            url?: string | null;
        };
        /** ResultsBody */
        ResultsBody: {
            /** Results */
            results: components["schemas"]["CallResult"][];
        };
        /**
         * RetryEvent
         * @description An answer was interrupted and is requested again: the text of this step so far is void.
         */
        RetryEvent: {
            /** Reason */
            reason: string;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "retry";
            /** Wait S */
            wait_s: number;
        };
        /**
         * RichPart
         * @description A value that code has shown, in one or more forms by MIME type. Binary forms are base64.
         */
        RichPart: {
            /** Data */
            data: {
                [key: string]: unknown;
            };
            /**
             * Role
             * @enum {string}
             */
            role: "value" | "display";
        };
        /**
         * RunStep
         * @description Run a program. What it leaves running ends with the step.
         */
        RunStep: {
            /** Command */
            command: string[];
            /**
             * Force
             * @description It is run even if its result is kept.
             */
            force?: boolean;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "run";
            /**
             * Shown
             * @description As its author wrote it. Empty: the command.
             */
            shown?: string;
            /**
             * User
             * @description Unset: that of the steps before.
             */
            user?: string | null;
        };
        /** SampledUsage */
        SampledUsage: {
            /** Interval S */
            interval_s: number;
            /** Samples */
            samples: components["schemas"]["UsageSample"][];
        };
        /**
         * SandboxEvent
         * @description Something that happened to a sandbox.
         */
        SandboxEvent: {
            /** Details */
            details?: {
                [key: string]: string;
            };
            /** Id */
            id: number;
            /** Reason */
            reason?: string | null;
            /** Sandbox */
            sandbox?: string | null;
            /** Sandbox Id */
            sandbox_id?: string | null;
            /** Tenant */
            tenant: string;
            /**
             * Time
             * Format: date-time
             */
            time: string;
            /**
             * Type
             * @enum {string}
             */
            type: "created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost";
        };
        /** SandboxExtend */
        SandboxExtend: {
            /**
             * Ttl S
             * @description Its lifetime from now on.
             */
            ttl_s: number;
        };
        /** SandboxFork */
        SandboxFork: {
            /**
             * Checkpoint
             * @description Its id or label. Unset: the sandbox as it is now.
             */
            checkpoint?: string | null;
            /**
             * Count
             * @description Unset: as many as names, or one.
             */
            count?: number | null;
            /**
             * Names
             * @description Unset: names that begin with that of the sandbox.
             */
            names?: string[] | null;
        };
        /**
         * SandboxInfo
         * @description A sandbox as `list` shows it.
         *
         *     Of one whose record cannot be read only the id, the namespace and the name are known: `status` is `error`, `reason`
         *     says why, `runtime` is `unknown`, `image` and `user` are empty. It can be destroyed.
         */
        SandboxInfo: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Cwd */
            cwd?: string | null;
            /**
             * Ephemeral
             * @default false
             */
            ephemeral: boolean;
            /** Expires At */
            expires_at?: string | null;
            /** Id */
            id: string;
            /** Image */
            image: string;
            /** Labels */
            labels?: {
                [key: string]: string;
            };
            /** Last Used At */
            last_used_at?: string | null;
            limits: components["schemas"]["Limits"];
            /**
             * Mounts
             * @default []
             */
            mounts: components["schemas"]["Mount"][];
            /** Name */
            name: string;
            /**
             * Namespace
             * @default default
             */
            namespace: string;
            network?: components["schemas"]["NetworkPolicy"] | null;
            /**
             * On Expiry
             * @default destroy
             * @enum {string}
             */
            on_expiry: "destroy" | "sleep" | "pause";
            /** Pid */
            pid?: number | null;
            /** Reason */
            reason?: string | null;
            /** Runtime */
            runtime: string;
            /**
             * Status
             * @enum {string}
             */
            status: "provisioning" | "running" | "paused" | "sleeping" | "shutdown" | "error";
            /**
             * Sudo
             * @default false
             */
            sudo: boolean;
            /**
             * Ttl Renewed By Use
             * @default false
             */
            ttl_renewed_by_use: boolean;
            /** Ttl S */
            ttl_s?: number | null;
            /** User */
            user: string;
        };
        /**
         * SandboxLimits
         * @description Those that are set hold from now on; the others stay.
         */
        SandboxLimits: {
            limits: components["schemas"]["Limits"];
        };
        /** SandboxNetwork */
        SandboxNetwork: {
            /** @description Null: no connection leaves the sandbox. */
            policy: components["schemas"]["NetworkPolicy"] | null;
        };
        /**
         * SandboxRequest
         * @description The options of a sandbox. What is left out is the tenant's, or the server's default.
         */
        SandboxRequest: {
            /** Cwd */
            cwd?: string | null;
            /** Env */
            env?: {
                [key: string]: string;
            };
            /**
             * Ephemeral
             * @description It ends with the client's connection: for clients that have one, which send the header Atoll-Tunnel.
             */
            ephemeral?: boolean;
            /** From Checkpoint */
            from_checkpoint?: string | null;
            /** Image */
            image?: string | null;
            /** Labels */
            labels?: {
                [key: string]: string;
            };
            limits?: components["schemas"]["Limits"] | null;
            /** Mounts */
            mounts?: components["schemas"]["Mount"][];
            /**
             * Name
             * @description Unset: the server chooses one.
             * @example demo
             */
            name?: string | null;
            /** @description Unset: no connection leaves it. */
            network?: components["schemas"]["NetworkPolicy"] | null;
            /**
             * On Expiry
             * @description What happens at the end of its lifetime.
             * @enum {string}
             */
            on_expiry?: "destroy" | "sleep" | "pause";
            /** Pause After S */
            pause_after_s?: number | null;
            /** Runtime */
            runtime?: string | null;
            /**
             * Secret Env
             * @description Variables that it has in clear. Written only.
             */
            secret_env?: {
                [key: string]: string;
            };
            /**
             * Secrets
             * @description By the variable that has the placeholder inside. Written only: no answer shows them.
             */
            secrets?: {
                [key: string]: components["schemas"]["SecretInput"];
            };
            /**
             * Sudo
             * @description Whether `sudo` works inside, without a password, for the user of commands that name none.
             */
            sudo?: boolean;
            /**
             * Ttl Renewed By Use
             * @description Whether each use begins the lifetime anew.
             */
            ttl_renewed_by_use?: boolean;
            /**
             * Ttl S
             * @description Its lifetime. Unset: the tenant's maximum, if there is one, else until it is deleted.
             */
            ttl_s?: number | null;
            /** User */
            user?: string | null;
        };
        /** SandboxRestore */
        SandboxRestore: {
            /**
             * Checkpoint
             * @description Its id, or a label of the sandbox's own.
             */
            checkpoint: string;
            /**
             * Foreign
             * @description The checkpoint may be another sandbox's, given by id.
             */
            foreign?: boolean;
        };
        /**
         * SandboxUpdate
         * @description What is left out stays as it is.
         */
        SandboxUpdate: {
            /**
             * Labels
             * @description Set; null removes one.
             */
            labels?: {
                [key: string]: string | null;
            };
            limits?: components["schemas"]["Limits"] | null;
            /** On Expiry */
            on_expiry?: ("destroy" | "sleep" | "pause") | null;
            /** Ttl Renewed By Use */
            ttl_renewed_by_use?: boolean | null;
            /**
             * Ttl S
             * @description Its lifetime from now on. Null: until it is deleted, or the longest that the tenant's policy allows.
             */
            ttl_s?: number | null;
        };
        /**
         * SecretInput
         * @description A value that stays outside: the sandbox has a placeholder, which is replaced only in requests to `hosts`.
         */
        SecretInput: {
            /** Header */
            header?: string;
            /** Hosts */
            hosts: string[];
            /**
             * Value
             * Format: password
             * @description Never shown again.
             */
            value: string;
        };
        /**
         * SessionBody
         * @description A session that is open.
         */
        SessionBody: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Executions */
            executions: number;
            /**
             * Expires At
             * Format: date-time
             * @description When it ends, if it is not used until then.
             */
            expires_at: string;
            /** Id */
            id: string;
            /**
             * Language
             * @enum {string}
             */
            language: "python" | "javascript" | "bash";
            /**
             * Last Used At
             * Format: date-time
             */
            last_used_at: string;
            /**
             * Sandbox
             * @description The name of its sandbox.
             */
            sandbox: string;
            /** Tools */
            tools: string[];
            /**
             * Version
             * @description Of the language.
             */
            version: string;
        };
        /**
         * SessionCreate
         * @description A session of code.
         */
        SessionCreate: {
            /**
             * Call Timeout S
             * @description How long the client may take to answer a call.
             */
            call_timeout_s?: number;
            /**
             * Cwd
             * @description Where it begins. Unset: where commands of the sandbox start.
             */
            cwd?: string | null;
            /** Env */
            env?: {
                [key: string]: string;
            };
            /**
             * Idle Timeout S
             * @description How long the session is kept without being used.
             */
            idle_timeout_s?: number;
            /**
             * Language
             * @enum {string}
             */
            language?: "python" | "javascript" | "bash";
            /**
             * Max Calls
             * @description Calls of tools in one execution.
             */
            max_calls?: number;
            /**
             * Output Limit Bytes
             * @description What a result keeps of stdout and of stderr, head and tail.
             */
            output_limit_bytes?: number;
            /**
             * Timeout S
             * @description Of an execution that names no other. Time in which calls wait for the client does not count. Null: no limit.
             */
            timeout_s?: number | null;
            /** Tools */
            tools?: components["schemas"]["ToolBody"][];
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /** SignalBody */
        SignalBody: {
            /**
             * Signal
             * @description By its number.
             */
            signal: number;
            /**
             * Tree
             * @description True: to every process that it started as well.
             */
            tree?: boolean;
        };
        /**
         * SpawnBody
         * @description A command to be started.
         */
        SpawnBody: {
            /**
             * Command
             * @description A string is a line for the shell, a list a program and its arguments.
             */
            command: string | string[];
            /**
             * Cwd
             * @description The working directory. Unset: the sandbox's own, else the user's home.
             */
            cwd?: string | null;
            /**
             * Env
             * @description Variables on top of the sandbox's environment.
             */
            env?: {
                [key: string]: string;
            } | null;
            /**
             * Merge Stderr
             * @description True: stderr is part of stdout, in the order of writing.
             */
            merge_stderr?: boolean;
            /** @description A terminal of this size; its output is then all stdout, and it has an input. */
            pty?: components["schemas"]["TerminalSize"] | null;
            /**
             * Stdin
             * @description True: it has an input, which `POST …/stdin` writes to. False: its input is empty.
             */
            stdin?: boolean;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /** SpriteCheckpoint */
        SpriteCheckpoint: {
            /** Createdat */
            createdAt: string;
            /** Id */
            id: string;
            /** Name */
            name?: string | null;
            /**
             * Sizebytes
             * @description What was written since the checkpoint before. Unset: that has not been counted yet.
             */
            sizeBytes?: number | null;
            /** Spriteid */
            spriteId: string;
        };
        /**
         * StatBody
         * @description The attributes of a file.
         */
        StatBody: {
            /** Gid */
            gid: number;
            /**
             * Kind
             * @enum {string}
             */
            kind: "file" | "directory" | "symlink" | "fifo" | "socket" | "char_device" | "block_device";
            /**
             * Mode
             * @description Permission bits, with set-id and sticky, as a number: 420 is 0644.
             */
            mode: number;
            /**
             * Mtime
             * Format: date-time
             */
            mtime: string;
            /** Size */
            size: number;
            /**
             * Target
             * @description The target of a symlink. Unset: it is not a symlink.
             */
            target?: string | null;
            /**
             * Target Base64
             * @description Its bytes, where they are no UTF-8.
             */
            target_base64?: string | null;
            /** Uid */
            uid: number;
        };
        /**
         * StoredBundle
         * @description A bundle of a tenant.
         */
        StoredBundle: {
            /** Bundle Id */
            bundle_id: string;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            manifest: components["schemas"]["BundleManifest"];
            /** Sha256 */
            sha256: string;
            /** Size Bytes */
            size_bytes: number;
            /** Tools */
            tools: components["schemas"]["ToolSchema"][];
            /** Url */
            url: string;
        };
        /** SymlinkBody */
        SymlinkBody: {
            /**
             * Path
             * @description A relative path begins where commands start.
             */
            path?: string | null;
            /**
             * Path Base64
             * @description The bytes of the path, where they are no UTF-8, instead of `path`.
             */
            path_base64?: string | null;
            /** Target */
            target?: string | null;
            /**
             * Target Base64
             * @description The bytes of the target, where they are no UTF-8, instead of `target`.
             */
            target_base64?: string | null;
            /**
             * User
             * @description The user inside. Unset: the sandbox's own.
             */
            user?: string | null;
        };
        /**
         * SystemProcess
         * @description Any process in the sandbox.
         */
        SystemProcess: {
            /** Command */
            command: string;
            /** Cpu S */
            cpu_s: number;
            /** Pid */
            pid: number;
            /** Ppid */
            ppid: number;
            /** Rss Bytes */
            rss_bytes: number;
            /**
             * Started At
             * Format: date-time
             */
            started_at: string;
            /** State */
            state: string;
            /** Uid */
            uid: number;
        };
        /** TagSet */
        TagSet: {
            /**
             * Version
             * @description A tag that the template has: the new one means the same.
             * @example default
             */
            version?: string;
        };
        /**
         * Template
         * @description A named beginning of sandboxes, made by a build.
         */
        Template: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Name */
            name: string;
            /** Reason */
            reason?: string | null;
            /** Versions */
            versions?: {
                [key: string]: components["schemas"]["TemplateVersion"];
            };
        };
        /**
         * TemplateVersion
         * @description What a template is under one of its tags: files, and what sandboxes that begin with them have.
         */
        TemplateVersion: {
            /** Build Id */
            build_id: string;
            /** Checkpoint */
            checkpoint: string;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Cwd */
            cwd?: string | null;
            /** Env */
            env?: {
                [key: string]: string;
            };
            /** Image */
            image: string;
            /**
             * Ready Command
             * @default []
             */
            ready_command: string[];
            /** Runtime */
            runtime: string;
            /**
             * Start Command
             * @default []
             */
            start_command: string[];
            /** User */
            user?: string | null;
        };
        /** Tenant */
        Tenant: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /**
             * Disabled
             * @default false
             */
            disabled: boolean;
            /** Name */
            name: string;
            /**
             * @default {
             *       "default_limits": {},
             *       "images": [
             *         "host"
             *       ],
             *       "max_limits": {},
             *       "mounts": [],
             *       "networks": []
             *     }
             */
            policy: components["schemas"]["TenantPolicy"];
            /** @default {} */
            quotas: components["schemas"]["Quotas"];
        };
        /** TenantCreate */
        TenantCreate: {
            /**
             * Name
             * @example acme
             */
            name: string;
            /** @description What it may ask for. Unset: the image `host`, no mounts, no network. */
            policy?: components["schemas"]["TenantPolicy"] | null;
            /** @description Unset: no limits. */
            quotas?: components["schemas"]["Quotas"] | null;
        };
        /**
         * TenantPolicy
         * @description What a tenant may ask for. `policy.py` checks requests against it.
         */
        TenantPolicy: {
            default_limits?: components["schemas"]["Limits"];
            /** Images */
            images?: string[];
            max_limits?: components["schemas"]["Limits"];
            /** Max Ttl S */
            max_ttl_s?: number | null;
            /** Mounts */
            mounts?: string[];
            /** Networks */
            networks?: string[];
            /** Runtimes */
            runtimes?: string[] | null;
        };
        /**
         * TenantUpdate
         * @description What is left out stays as it is; what is given is replaced as a whole.
         */
        TenantUpdate: {
            /** Disabled */
            disabled?: boolean | null;
            policy?: components["schemas"]["TenantPolicy"] | null;
            quotas?: components["schemas"]["Quotas"] | null;
        };
        /** TerminalSize */
        TerminalSize: {
            /** Cols */
            cols: number;
            /** Rows */
            rows: number;
        };
        /**
         * TextEvent
         * @description Text of the model: a piece of it when streaming, else all text of one step.
         */
        TextEvent: {
            /** Text */
            text: string;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "text";
        };
        /** TextPart */
        TextPart: {
            /** Text */
            text: string;
            /**
             * Type
             * @default text
             * @constant
             */
            type: "text";
        };
        /**
         * ThinkingEvent
         * @description Visible reasoning of the model.
         */
        ThinkingEvent: {
            /** Text */
            text: string;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "thinking";
        };
        /**
         * Tokens
         * @description Token counts of a model.
         */
        Tokens: {
            /**
             * Cache Read
             * @default 0
             */
            cache_read: number;
            /**
             * Cache Write
             * @default 0
             */
            cache_write: number;
            /**
             * Input
             * @default 0
             */
            input: number;
            /**
             * Output
             * @default 0
             */
            output: number;
        };
        /**
         * ToolBody
         * @description A tool of the client, which code can call as a function.
         */
        ToolBody: {
            /** Description */
            description?: string;
            /**
             * Input Schema
             * @description The JSON schema of its arguments, an object. They are not checked against it here.
             */
            input_schema?: {
                [key: string]: unknown;
            };
            /** Name */
            name: string;
            /**
             * Needs Approval
             * @description Each call waits for an approval before the client is told of it.
             */
            needs_approval?: boolean;
        };
        /**
         * ToolCallEvent
         * @description The model calls a tool. Calls of one step run concurrently.
         */
        ToolCallEvent: {
            /** Id */
            id: string;
            /** Input */
            input: {
                [key: string]: unknown;
            } | string;
            /** Tool */
            tool: string;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "tool_call";
        };
        /**
         * ToolDeclaration
         * @description A tool that the client runs, with what a model is told about it.
         */
        ToolDeclaration: {
            /** Description */
            description?: string;
            /**
             * Input Schema
             * @description The JSON schema of its arguments, of the type `object`.
             */
            input_schema?: {
                [key: string]: unknown;
            };
            /** Name */
            name: string;
        };
        /**
         * ToolResult
         * @description The result of a call, for the model and for programs.
         */
        ToolResult: {
            /** Content */
            content: string | (components["schemas"]["TextPart"] | components["schemas"]["ImagePart"] | components["schemas"]["MediaPart"])[];
            /**
             * Is Error
             * @default false
             */
            is_error: boolean;
            /**
             * Links
             * @default []
             */
            links: components["schemas"]["ResultLink"][];
            /** Structured */
            structured?: {
                [key: string]: unknown;
            } | null;
        };
        /**
         * ToolResultEvent
         * @description A tool call has ended.
         */
        ToolResultEvent: {
            /** Duration S */
            duration_s: number;
            /** Id */
            id: string;
            result: components["schemas"]["ToolResult"];
            /** Tool */
            tool: string;
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "tool_result";
        };
        /**
         * ToolResultInput
         * @description The result of a call that the client has made.
         */
        ToolResultInput: {
            /**
             * Content
             * @description What the model reads: text, or parts.
             * @example ok
             */
            content: string | components["schemas"]["ResultPart"][];
            /**
             * Is Error
             * @description Whether the call failed; `content` says why.
             */
            is_error?: boolean;
            /**
             * Name
             * @example write_file
             */
            name: string;
            /**
             * Tool Call Id
             * @example call_01
             */
            tool_call_id: string;
        };
        /**
         * ToolSchema
         * @description A tool as a model sees it.
         */
        ToolSchema: {
            /** Description */
            description: string;
            /** Input Schema */
            input_schema: {
                [key: string]: unknown;
            };
            /** Name */
            name: string;
        };
        /**
         * Truncation
         * @description The bytes that a limit on output left out: `start` up to, not including, `end` of `total`.
         */
        Truncation: {
            /** End */
            end: number;
            /** Start */
            start: number;
            /** Total */
            total: number;
        };
        /**
         * TurnBegun
         * @description Of the first event of a turn.
         */
        TurnBegun: {
            /** Conversation Id */
            conversation_id: string;
            /** Turn Id */
            turn_id: string;
            /** Version */
            version: number;
        };
        /**
         * UploadedBundle
         * @description What a config names: `nap-bundle://<bundle_id>` and the digest.
         */
        UploadedBundle: {
            /**
             * Bundle Id
             * @example bdl_5b1f0c9e7d2a4f6380c1e2d3
             */
            bundle_id: string;
            /**
             * Sha256
             * @description Of the bytes that were uploaded, in hexadecimal.
             * @example 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
             */
            sha256: string;
            /**
             * Size Bytes
             * @example 4096
             */
            size_bytes: number;
        };
        /**
         * UploadedFiles
         * @description An archive for copies.
         */
        UploadedFiles: {
            /** Files */
            files: string;
        };
        /** UsableRuntime */
        UsableRuntime: {
            capabilities: components["schemas"]["Capabilities"];
            /** Name */
            name: string;
        };
        /**
         * Usage
         * @description What a sandbox uses now. A number that the machine does not report is unset.
         */
        Usage: {
            /** Cache Bytes */
            cache_bytes?: number | null;
            /** Cpu S */
            cpu_s: number | null;
            /** Disk Bytes */
            disk_bytes: number;
            /** Memory Bytes */
            memory_bytes: number | null;
            /** Memory Peak Bytes */
            memory_peak_bytes: number | null;
            /** Oom Kills */
            oom_kills: number | null;
            /** Pids */
            pids: number | null;
        };
        /**
         * UsageEvent
         * @description The model has completed an answer.
         */
        UsageEvent: {
            /** Step */
            step: number;
            tokens: components["schemas"]["Tokens"];
            total: components["schemas"]["Tokens"];
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            type: "usage";
        };
        /**
         * UsageSample
         * @description What a sandbox used at a moment. A number that the machine does not report is unset.
         */
        UsageSample: {
            /** Cache Bytes */
            cache_bytes?: number | null;
            /** Cpu S */
            cpu_s?: number | null;
            /** Disk Bytes */
            disk_bytes?: number | null;
            /** Memory Bytes */
            memory_bytes?: number | null;
            /** Pids */
            pids?: number | null;
            /**
             * Time
             * Format: date-time
             */
            time: string;
        };
        /** UserStep */
        UserStep: {
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "user";
            /** User */
            user: string;
        };
        /**
         * Volume
         * @description A named directory that outlives sandboxes, and that several of them mount at once.
         */
        Volume: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Name */
            name: string;
            /** Reason */
            reason?: string | null;
            /**
             * Sandboxes
             * @default []
             */
            sandboxes: string[];
            /** Size Bytes */
            size_bytes?: number | null;
            /** Used Bytes */
            used_bytes: number;
        };
        /** VolumeCreate */
        VolumeCreate: {
            /**
             * Name
             * @example cache
             */
            name: string;
            /**
             * Size Bytes
             * @description What may be written to it. Unset: no limit but the free space; a tenant with a quota of disk has to set it.
             */
            size_bytes?: number | null;
        };
        /**
         * WarmPool
         * @description A warm pool: sandboxes of one template that are ready to be claimed.
         */
        WarmPool: {
            /** Count */
            count: number;
            /** Image */
            image: string;
            limits: components["schemas"]["Limits"];
            /** Ready */
            ready: number;
            /** Reason */
            reason?: string | null;
            /** Runtime */
            runtime: string;
        };
        /** WarmPoolSet */
        WarmPoolSet: {
            /**
             * Count
             * @description How many sandboxes are to be ready. 0 removes the pool.
             */
            count: number;
            /** Image */
            image?: string | null;
            limits?: components["schemas"]["Limits"] | null;
            /** Runtime */
            runtime?: string | null;
        };
        /**
         * Webhook
         * @description A URL that gets the events of a tenant.
         */
        Webhook: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /**
             * Disabled
             * @default false
             */
            disabled: boolean;
            /** Id */
            id: string;
            /**
             * Types
             * @default []
             */
            types: ("created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost")[];
            /** Url */
            url: string;
        };
        /** WebhookCreate */
        WebhookCreate: {
            /**
             * Types
             * @description Empty: all.
             */
            types?: ("created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost")[];
            /**
             * Url
             * @example https://example.com/hook
             */
            url: string;
        };
        /**
         * WebhookDelivery
         * @description An event on its way to a webhook.
         */
        WebhookDelivery: {
            /** Attempts */
            attempts: number;
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Delivered At */
            delivered_at?: string | null;
            /** Error */
            error?: string | null;
            /** Event */
            event?: number | null;
            /** Id */
            id: number;
            /** Next Attempt At */
            next_attempt_at?: string | null;
            /** Response Status */
            response_status?: number | null;
            /**
             * Status
             * @enum {string}
             */
            status: "pending" | "delivered" | "failed";
            /** Type */
            type: string;
            /** Webhook */
            webhook: string;
        };
        /**
         * WebhookUpdate
         * @description What is left out stays as it is.
         */
        WebhookUpdate: {
            /** Disabled */
            disabled?: boolean | null;
            /** Types */
            types?: ("created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost")[] | null;
            /** Url */
            url?: string | null;
        };
        /** WorkdirStep */
        WorkdirStep: {
            /**
             * @description discriminator enum property added by openapi-typescript
             * @enum {string}
             */
            kind: "workdir";
            /** Path */
            path: string;
        };
        /**
         * WorkspaceBody
         * @description The workspace of a config.
         */
        WorkspaceBody: {
            /** Config Id */
            config_id: string;
            instance: components["schemas"]["WorkspaceInstance"] | null;
            /** Sandbox */
            sandbox: string;
            /** State */
            state: ("provisioning" | "running" | "sleeping" | "failed" | "destroyed") | null;
        };
        /**
         * WorkspaceInstance
         * @description One life of a workspace: from the boot of its sandbox to its end.
         */
        WorkspaceInstance: {
            /**
             * Created At
             * Format: date-time
             */
            created_at: string;
            /** Ended At */
            ended_at?: string | null;
            /** External Id */
            external_id: string;
            /**
             * Log
             * @default
             */
            log: string;
            /** Message */
            message?: string | null;
            /** Ready At */
            ready_at?: string | null;
            /** Reason */
            reason?: ("bundle_fetch_failed" | "bundle_integrity_failed" | "bundle_manifest_invalid" | "bundle_build_failed" | "bundle_entrypoint_invalid") | null;
            /**
             * State
             * @enum {string}
             */
            state: "provisioning" | "running" | "sleeping" | "failed" | "destroyed";
        };
        /**
         * WrittenBody
         * @description What was written.
         */
        WrittenBody: {
            /**
             * Size
             * @description Of the file now; of an archive, the bytes of the files in it.
             */
            size: number;
        };
    };
    responses: never;
    parameters: {
        /** @description The tenant to act in, for keys of the server. Unset: `default`. */
        Tenant: string;
    };
    requestBodies: never;
    headers: {
        /** @description The same as in the server's log. */
        "Atoll-Request-Id": string;
    };
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    sprites_checkpoints: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SpriteCheckpoint"][];
                };
            };
        };
    };
    audit_list: {
        parameters: {
            query?: {
                action?: string;
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description Of all tenants; for keys of the server. */
                everyone?: boolean;
                /** @description The id of a key. */
                key?: string;
                /** @description How many items a page has at most. */
                limit?: number;
                since?: string;
                until?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_AuditEvent_"];
                };
            };
        };
    };
    builds_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Build_"];
                };
            };
        };
    };
    builds_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["BuildRequest"];
            };
        };
        responses: {
            /** @description It has begun. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Build"];
                };
            };
        };
    };
    builds_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a build. */
                build: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Build"];
                };
            };
        };
    };
    builds_cancel: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a build. */
                build: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Build"];
                };
            };
        };
    };
    builds_events: {
        parameters: {
            query?: {
                /** @description The number of the last line that the client has. */
                after?: number;
                /** @description False: the stream ends when all events that are kept have been sent. */
                follow?: boolean;
            };
            header?: never;
            path: {
                /** @description The id of a build. */
                build: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A stream of events. The schema is that of the `data` of each. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    builds_log: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The id of a build. */
                build: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_BuildLogLine_"];
                };
            };
        };
    };
    builds_files: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description What the files are called: 64 hexadecimal digits, which the client chooses: the SHA-256, say. */
                files: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["UploadedFiles"];
                };
            };
        };
    };
    builds_upload: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description What the files are called: 64 hexadecimal digits, which the client chooses: the SHA-256, say. */
                files: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/x-tar": string;
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    bundles_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_StoredBundle_"];
                };
            };
        };
    };
    bundles_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/gzip": string;
            };
        };
        responses: {
            /** @description It was there already. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["UploadedBundle"];
                };
            };
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["UploadedBundle"];
                };
            };
        };
    };
    bundles_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a bundle. */
                bundle: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StoredBundle"];
                };
            };
        };
    };
    bundles_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a bundle. */
                bundle: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    chat: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ChatBody"];
            };
        };
        responses: {
            /** @description The agent's answer, or the calls that the client is to make. With `Accept: text/event-stream`: the events `turn` (its ids), `text`, `thinking`, `tool_call`, `tool_result`, `usage`, `retry`, and at last `end` with the answer, or `error`. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ChatAnswer"];
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    chat_turns_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
                /** @description The id of a turn. */
                turn: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ChatTurn"];
                };
            };
        };
    };
    chat_turns_cancel: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
                /** @description The id of a turn. */
                turn: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ChatTurn"];
                };
            };
        };
    };
    chat_turns_events: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
                /** @description The id of a turn. */
                turn: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A stream of events. The schema is that of the `data` of each. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    checkpoints_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Checkpoint_"];
                };
            };
        };
    };
    checkpoints_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a checkpoint. */
                checkpoint: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Checkpoint"];
                };
            };
        };
    };
    checkpoints_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a checkpoint. */
                checkpoint: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    configs_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_AgentConfig_"];
                };
            };
        };
    };
    configs_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ConfigCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AgentConfig"];
                };
            };
        };
    };
    configs_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AgentConfig"];
                };
            };
        };
    };
    configs_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    configs_update: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ConfigUpdate"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["AgentConfig"];
                };
            };
        };
    };
    configs_versions: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_AgentConfig_"];
                };
            };
        };
    };
    workspaces_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WorkspaceBody"];
                };
            };
        };
    };
    workspaces_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    workspaces_instances: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_WorkspaceInstance_"];
                };
            };
        };
    };
    workspaces_instance: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of an agent config. */
                config: string;
                external_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WorkspaceInstance"];
                };
            };
        };
    };
    conversations_list: {
        parameters: {
            query?: {
                /** @description `next` of a page. */
                after?: string;
                /** @description Only those of this agent config. */
                config_id?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Conversation_"];
                };
            };
        };
    };
    conversations_get: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The id of a conversation. */
                conversation: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ConversationBody"];
                };
            };
        };
    };
    conversations_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a conversation. */
                conversation: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    events_stream: {
        parameters: {
            query?: {
                /** @description As Last-Event-ID. 0: all that are kept. Unset: what happens from now on. */
                after?: number;
                /** @description False: the stream ends when all events that are kept have been sent. */
                follow?: boolean;
                /** @description Only events of these types. */
                types?: ("created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost")[];
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A stream of events. The schema is that of the `data` of each. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    host_gc: {
        parameters: {
            query?: {
                /** @description Only sandboxes that were abandoned. */
                abandoned_only?: boolean;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["GcResult"];
                };
            };
        };
    };
    host_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["HostFacts"];
                };
            };
        };
    };
    host_image_contents: {
        parameters: {
            query: {
                /** @description Which image. */
                reference: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["FoundContents"];
                };
            };
        };
    };
    images_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_ImageInfo_"];
                };
            };
        };
    };
    images_pull: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ImagePull"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ImageInfo"];
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    images_remove: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description As the list shows it. */
                reference: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    keys_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
                /** @description The keys of the server itself; for its own keys only. */
                server?: boolean;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_ApiKey_"];
                };
            };
        };
    };
    keys_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["KeyCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["NewKey"];
                };
            };
        };
    };
    keys_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a key. */
                key: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ApiKey"];
                };
            };
        };
    };
    keys_revoke: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a key. */
                key: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ApiKey"];
                };
            };
        };
    };
    me: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Me"];
                };
            };
        };
    };
    sandboxes_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description `KEY` or `KEY=VALUE`; several: all of them. */
                label?: string[];
                /** @description How many items a page has at most. */
                limit?: number;
                /** @description What the name begins with. */
                prefix?: string;
                /** @description Several: one of them. */
                status?: ("provisioning" | "running" | "paused" | "sleeping" | "shutdown" | "error")[];
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_SandboxInfo_"];
                };
            };
        };
    };
    sandboxes_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxRequest"];
            };
        };
        responses: {
            /** @description It was created, and answers. */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_delete: {
        parameters: {
            query?: {
                /** @description Whether its checkpoints are deleted too. */
                checkpoints?: boolean;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    sandboxes_update: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxUpdate"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_checkpoints: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Checkpoint_"];
                };
            };
        };
    };
    checkpoints_create: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CheckpointCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Checkpoint"];
                };
            };
        };
    };
    code_approvals_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_ApprovalBody_"];
                };
            };
        };
    };
    code_approvals_decide: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                approval: string;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["DecisionBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    code_sessions_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_SessionBody_"];
                };
            };
        };
    };
    code_sessions_create: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SessionCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SessionBody"];
                };
            };
        };
    };
    code_sessions_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SessionBody"];
                };
            };
        };
    };
    code_sessions_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    code_execute: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ExecuteBody"];
            };
        };
        responses: {
            /** @description The execution: it has ended, or waits for results of calls or for an approval. With `Accept: text/event-stream`: the events `execution` ({id}), `stdout` and `stderr` ({text}), `call`, `approval`, and at last `end` with the execution, or `error`. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ExecutionBody"];
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    code_executions_get: {
        parameters: {
            query?: {
                /** @description How long to wait until it has ended, or waits itself. */
                wait_s?: number;
            };
            header?: never;
            path: {
                execution: string;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ExecutionBody"];
                };
            };
        };
    };
    code_interrupt: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    code_results: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
                session: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ResultsBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    sandboxes_events: {
        parameters: {
            query?: {
                /** @description As Last-Event-ID. 0: all that are kept. Unset: what happens from now on. */
                after?: number;
                /** @description False: the stream ends when all events that are kept have been sent. */
                follow?: boolean;
                /** @description Only events of these types. */
                types?: ("created" | "paused" | "resumed" | "slept" | "woke" | "shutdown" | "died" | "expired" | "destroyed" | "checkpointed" | "restored" | "updated" | "lost")[];
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A stream of events. The schema is that of the `data` of each. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    sandboxes_exec: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ExecBody"];
            };
        };
        responses: {
            /** @description The command has ended, whatever its exit code, also if it was killed at its time-out (`timed_out`). With `Accept: text/event-stream`: the events `stdout` and `stderr` ({text} or {base64}) as output comes, then `end` with the outcome, or `error`. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ExecResult"];
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    sandboxes_export: {
        parameters: {
            query?: {
                /** @description As it was then; unset: as it is now. */
                checkpoint?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/zstd": string;
                };
            };
        };
    };
    sandboxes_extend: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxExtend"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    files_read: {
        parameters: {
            query?: {
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The contents. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
            /** @description The bytes of the range. */
            206: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": string;
                };
            };
        };
    };
    files_write: {
        parameters: {
            query?: {
                /** @description Add to the file. Not atomic. */
                append?: boolean;
                /** @description Refuse a file that exists. */
                exclusive?: boolean;
                /** @description Permission bits, in octal: 0644. */
                mode?: string;
                /** @description Given to this user: NAME, UID, UID:GID. Needs an absolute path. */
                owner?: string;
                /** @description Make the directories above it. */
                parents?: boolean;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WrittenBody"];
                };
            };
        };
    };
    files_remove: {
        parameters: {
            query?: {
                missing_ok?: boolean;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description Also a directory that is not empty. */
                recursive?: boolean;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_archive: {
        parameters: {
            query?: {
                /** @description Globs of what is left out. */
                exclude?: string[];
                /** @description Of the contents of the directory, without its own name. */
                inside?: boolean;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A pax tar. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/x-tar": string;
                };
            };
        };
    };
    files_unpack: {
        parameters: {
            query?: {
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/x-tar": string;
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WrittenBody"];
                };
            };
        };
    };
    files_chmod: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ChmodBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_chown: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ChownBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_glob: {
        parameters: {
            query: {
                /** @description Also names that begin with a dot. */
                hidden?: boolean;
                limit?: number;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                pattern: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["EntryList"];
                };
            };
        };
    };
    files_grep: {
        parameters: {
            query: {
                /** @description Lines around each match. */
                context?: number;
                /** @description Also files whose names begin with a dot. */
                hidden?: boolean;
                ignore_case?: boolean;
                /** @description A glob of the files to search. */
                include?: string;
                limit?: number;
                /** @description The pattern is a text, not a regular expression. */
                literal?: boolean;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                pattern: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["MatchList"];
                };
            };
        };
    };
    files_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. */
                after?: string;
                limit?: number;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["EntryList"];
                };
            };
        };
    };
    files_mkdir: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["MkdirBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_rename: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["RenameBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_stat: {
        parameters: {
            query?: {
                /** @description False: of a symlink itself. */
                follow?: boolean;
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StatBody"];
                };
            };
        };
    };
    files_symlink: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SymlinkBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    files_watch: {
        parameters: {
            query?: {
                /** @description A relative path begins where commands start. */
                path?: string;
                /** @description The bytes of the path, where they are no UTF-8. */
                path_base64?: string;
                recursive?: boolean;
                /** @description The user inside. Unset: the sandbox's own. */
                user?: string;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The event `ready`, then `change` for each change: {change, path, path_base64, kind}. `change` is created, modified, deleted, moved_from, moved_to, attributes, or lost: read the tree again then. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    sandboxes_fork: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxFork"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_SandboxInfo_"];
                };
            };
        };
    };
    sandboxes_get_limits: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Limits"];
                };
            };
        };
    };
    sandboxes_set_limits: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxLimits"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Limits"];
                };
            };
        };
    };
    sandboxes_get_network: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxNetwork"];
                };
            };
        };
    };
    sandboxes_set_network: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxNetwork"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxNetwork"];
                };
            };
        };
    };
    sandboxes_network_audit: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_AuditRecord_"];
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    sandboxes_pause: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    ports_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Preview_"];
                };
            };
        };
    };
    ports_expose: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["PortExpose"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Preview"];
                };
            };
        };
    };
    ports_unexpose: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The port inside. */
                port: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    processes_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_ProcessInfo_"];
                };
            };
        };
    };
    processes_spawn: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SpawnBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessInfo"];
                };
            };
        };
    };
    processes_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessInfo"];
                };
            };
        };
    };
    processes_kill: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    processes_output: {
        parameters: {
            query?: {
                encoding?: "text" | "base64";
                /** @description False: only what it has written until now. */
                follow?: boolean;
                stderr_offset?: number;
                stdout_offset?: number;
            };
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description The events `stdout` and `stderr` ({text} or {base64}, and the `offset` of its first byte), `gap` ({stream, offset}: output before this offset is no longer kept), and `exit` with how it ended. Each has an id, with which `Last-Event-ID` goes on at the next byte. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/event-stream": {
                        data: string;
                        event: string;
                        id?: string;
                    };
                };
            };
        };
    };
    processes_resize: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TerminalSize"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    processes_signal: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SignalBody"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    processes_stdin: {
        parameters: {
            query?: {
                /** @description True: the input ends after these bytes. */
                eof?: boolean;
            };
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    processes_wait: {
        parameters: {
            query?: {
                timeout_s?: number;
            };
            header?: never;
            path: {
                /** @description The `id` of the process, which is not its `pid`. */
                process: number;
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ProcessInfo"];
                };
            };
        };
    };
    processes_ps: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_SystemProcess_"];
                };
            };
        };
    };
    sandboxes_restore: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxRestore"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_resume: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_shutdown: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_sleep: {
        parameters: {
            query?: {
                /** @description Only if it has not been used for so long. */
                unused_for_s?: number;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_stats: {
        parameters: {
            query?: {
                /** @description Whether its files are counted, one by one. Without, that is 0. */
                disk?: boolean;
            };
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Usage"];
                };
            };
        };
    };
    sandboxes_stats_history: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SampledUsage"];
                };
            };
        };
    };
    sandboxes_wake: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name or the id of a sandbox. */
                sandbox: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    sandboxes_check: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SandboxRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    sandboxes_import: {
        parameters: {
            query?: {
                cpus?: number;
                disk_bytes?: number;
                /** @description Unset: the one with the file's digest. */
                image?: string;
                /** @description The most that it may be unpacked. */
                limit_bytes?: number;
                memory_bytes?: number;
                /** @description Unset: the name in the file. */
                name?: string;
                open_files?: number;
                pids?: number;
                runtime?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SandboxInfo"];
                };
            };
        };
    };
    templates_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Template_"];
                };
            };
        };
    };
    templates_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a template. */
                template: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Template"];
                };
            };
        };
    };
    templates_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a template. */
                template: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    templates_tag: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The tag to set. */
                tag: string;
                /** @description The name of a template. */
                template: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TagSet"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Template"];
                };
            };
        };
    };
    templates_untag: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description One of its tags. */
                tag: string;
                /** @description The name of a template. */
                template: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    templates_gc: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["RemovedResults"];
                };
            };
        };
    };
    tenants_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Tenant_"];
                };
            };
        };
    };
    tenants_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TenantCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Tenant"];
                };
            };
        };
    };
    tenants_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a tenant. */
                tenant: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Tenant"];
                };
            };
        };
    };
    tenants_delete: {
        parameters: {
            query?: {
                /** @description Whether its sandboxes are destroyed. Else one that has any stays. */
                destroy?: boolean;
            };
            header?: never;
            path: {
                /** @description The name of a tenant. */
                tenant: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    tenants_update: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a tenant. */
                tenant: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TenantUpdate"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Tenant"];
                };
            };
        };
    };
    volumes_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Volume_"];
                };
            };
        };
    };
    volumes_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["VolumeCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Volume"];
                };
            };
        };
    };
    volumes_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a volume. */
                volume: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Volume"];
                };
            };
        };
    };
    volumes_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a volume. */
                volume: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    volumes_export: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The name of a volume. */
                volume: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/x-tar": string;
                };
            };
        };
    };
    volumes_import: {
        parameters: {
            query?: {
                /** @description What may be written to it. Unset: no limit. */
                size_bytes?: number;
            };
            header?: never;
            path: {
                /** @description The name of the new volume. */
                volume: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Volume"];
                };
            };
        };
    };
    warm_pools_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_WarmPool_"];
                };
            };
        };
    };
    warm_pools_set: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["WarmPoolSet"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WarmPool"];
                };
            };
        };
    };
    warm_pools_remove: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    webhooks_list: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Webhook_"];
                };
            };
        };
    };
    webhooks_create: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["WebhookCreate"];
            };
        };
        responses: {
            /** @description Successful Response */
            201: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["NewWebhook"];
                };
            };
        };
    };
    webhooks_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a webhook. */
                webhook: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Webhook"];
                };
            };
        };
    };
    webhooks_delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a webhook. */
                webhook: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
        };
    };
    webhooks_update: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a webhook. */
                webhook: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["WebhookUpdate"];
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Webhook"];
                };
            };
        };
    };
    webhooks_deliveries: {
        parameters: {
            query?: {
                /** @description `next` of the page before. Unset: the first page. */
                after?: string;
                /** @description How many items a page has at most. */
                limit?: number;
            };
            header?: never;
            path: {
                /** @description The id of a webhook. */
                webhook: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_WebhookDelivery_"];
                };
            };
        };
    };
    webhooks_test: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                /** @description The id of a webhook. */
                webhook: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WebhookDelivery"];
                };
            };
        };
    };
}
