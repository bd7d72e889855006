"""The commands: each is one function, which holds its grammar and what it does.

To add a command, write a function in the module of its group, with `@commands.command()`: its
parameters are the arguments and options, its docstring is the help, its body is the work. `async def` for a command
that checks nothing first; `def` for one that refuses wrong arguments (status 2) and then returns the coroutine of an
`async def` function. `--json`, `--state-dir` and the resource options come with the command class (`command.py`). A new
module and a new command are named in `MODULES` (`app.py`), commands in the order of their definition: a test checks it.

These modules import only what is light; the engine, pydantic and anyio are imported in function bodies, because `atoll
--help` imports all of these modules. Larger machinery has modules of its own: `streaming.py` (a command's streams),
`conversation.py` and `transcript.py` (an agent), `render.py` (output), `terminal.py` (this process's streams).
"""
