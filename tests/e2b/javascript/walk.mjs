// Every call of the JavaScript SDKs that users make, against a running server. Run by test_javascript.py.
import assert from 'node:assert/strict'
import { Sandbox as CodeSandbox } from '@e2b/code-interpreter'
import { CommandExitError, FileType, NotFoundError, Sandbox, Template, TimeoutError, waitForFile } from 'e2b'

const eventually = async (check) => {
  for (const end = Date.now() + 30_000; ; await new Promise((done) => setTimeout(done, 50))) {
    if (await check()) return
    assert.ok(Date.now() < end, 'it did not happen within 30 s')
  }
}

// ---- the control plane

const box = await Sandbox.create({ timeoutMs: 120_000, metadata: { who: 'a b&c' }, envs: { GREETING: 'hello' } })
assert.equal((await box.getInfo()).metadata.who, 'a b&c')
const found = await Sandbox.list({ query: { metadata: { who: 'a b&c' } } }).nextItems()
assert.deepEqual(found.map((each) => each.sandboxId), [box.sandboxId])
await box.setTimeout(300_000)
assert.ok((await box.getMetrics()).length >= 1)

// ---- commands

const ran = await box.commands.run('echo $GREETING; echo oops >&2')
assert.deepEqual([ran.stdout, ran.stderr, ran.exitCode], ['hello\n', 'oops\n', 0])
await assert.rejects(box.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
await assert.rejects(box.commands.run('sleep 1000', { timeoutMs: 500 }), TimeoutError)
const fed = await box.commands.run('cat', { background: true, stdin: true })
await box.commands.sendStdin(fed.pid, 'typed\n')
await box.commands.closeStdin(fed.pid)
assert.equal((await fed.wait()).stdout, 'typed\n')
const endless = await box.commands.run('sleep 1000', { background: true })
assert.ok((await box.commands.list()).some((each) => each.pid === endless.pid))
assert.ok(await endless.kill())
await assert.rejects(endless.wait(), CommandExitError)

let typed = ''
const terminal = await box.pty.create({ cols: 80, rows: 24, onData: (data) => { typed += new TextDecoder().decode(data) } })
await box.pty.resize(terminal.pid, { cols: 100, rows: 30 })
await box.pty.sendInput(terminal.pid, new TextEncoder().encode('echo size $(stty size)\n'))
await eventually(() => typed.includes('size 30 100'))
await box.pty.kill(terminal.pid)

// ---- files

await box.files.write('dir/one.txt', 'héllo')
assert.equal(await box.files.read('dir/one.txt'), 'héllo')
assert.equal((await box.files.read('dir/one.txt', { format: 'bytes' })).length, 6)
await box.files.write([{ path: 'dir/two', data: '2' }, { path: 'dir/three', data: '3' }])
assert.deepEqual((await box.files.list('dir')).map((each) => each.name), ['one.txt', 'three', 'two'])
assert.equal((await box.files.getInfo('dir')).type, FileType.DIR)
assert.equal(await box.files.makeDir('dir'), false)
await box.files.rename('dir/two', 'dir/2')
assert.ok(await box.files.exists('dir/2'))
await assert.rejects(box.files.read('missing'), NotFoundError)
const seen = []
const watch = await box.files.watchDir('dir', (event) => seen.push(event.name))
await box.files.write('dir/new', 'x')
await eventually(() => seen.includes('new'))
await watch.stop()
await box.files.remove('dir')
await box.files.write('signed', 'secret')
assert.equal(await (await fetch(await box.downloadUrl('signed', { useSignatureExpiration: 60 }))).text(), 'secret')

// ---- life

await box.pause()
assert.equal(await box.isRunning(), false)
const again = await Sandbox.connect(box.sandboxId)
assert.equal(await again.files.read('signed'), 'secret')
const snapshot = await again.createSnapshot()
const copy = await Sandbox.create(snapshot.snapshotId)
assert.equal(await copy.files.read('signed'), 'secret')
await copy.kill()
assert.ok(await Sandbox.deleteSnapshot(snapshot.snapshotId))
assert.ok(await again.kill())

// ---- templates

const said = []
const template = Template({ fileContextPath: import.meta.dirname })
  .fromImage('host')
  .setEnvs({ WHO: 'js' })
  .setWorkdir('/home/user/app')
  .copy('package.json', './')
  .runCmd('echo "built by $WHO" > built')
  .setStartCmd('touch /tmp/ready; sleep 1000', waitForFile('/tmp/ready'))
const built = await Template.build(template, 'from-js', { onBuildLogs: (entry) => said.push(entry.message) })
assert.ok(await Template.exists('from-js'))
assert.ok(said.some((message) => message.includes('echo "built by $WHO"')))
const begun = await Sandbox.create(built.templateId, { timeoutMs: 60_000 })
assert.equal((await begun.commands.run('cat built; ls; echo $WHO')).stdout, 'built by js\nbuilt\npackage.json\njs\n')
assert.ok(await begun.files.exists('/tmp/ready'))
await begun.kill()
const failing = Template().fromTemplate('from-js').runCmd('exit 9')
await assert.rejects(Template.build(failing, 'fails'), /exit code 9/)

// ---- the code interpreter

const code = await CodeSandbox.create({ timeoutMs: 120_000 })
await code.runCode('x = 20')
assert.equal((await code.runCode('x + 22')).text, '42')
const lines = []
const failed = await code.runCode('print("out"); 1 / 0', { onStdout: (message) => lines.push(message.line) })
assert.equal(failed.error.name, 'ZeroDivisionError')
assert.deepEqual(lines, ['out\n'])
const context = await code.createCodeContext({ cwd: '/tmp' })
assert.equal((await code.runCode('import os; os.getcwd()', { context })).text, '/tmp')
await code.removeCodeContext(context)
assert.equal((await code.runCode('echo bash', { language: 'bash' })).logs.stdout.join(''), 'bash\n')
await assert.rejects(code.runCode('import time; time.sleep(1000)', { timeoutMs: 1000 }))
assert.equal((await code.runCode('x')).text, '20')
await code.kill()
console.log('walked')
