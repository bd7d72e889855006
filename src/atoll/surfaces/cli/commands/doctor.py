"""`doctor` and `version`: this machine, and this installation."""

from __future__ import annotations

from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, command_module

commands = command_module()


@commands.command(cls=AtollCommand)
async def doctor(context: CommandContext) -> int:
    """Show what works on this machine, and how to fix the rest.

    The exit status is 1 if no runtime works.
    """
    async with context.open_engine() as engine:
        found = engine.doctor()
        working = list(engine.drivers())
        state_dir = engine.state_dir
    if context.as_json:
        findings = [finding.model_dump(mode="json") for finding in found]
        render.emit_json({"runtimes": working, "state_dir": str(state_dir), "findings": findings})
    else:
        render.findings([(finding.ok, finding.topic, finding.detail, finding.fix) for finding in found])
        render.say("")
        if working:
            render.say(f"runtimes that work: {', '.join(working)}")
        else:
            render.say("no runtime works, so no sandbox can be created; apply the fixes above")
    return 0 if working else FAILED


@commands.command(cls=AtollCommand)
def version(context: CommandContext) -> int:
    """Print the version."""
    from atoll.surfaces.cli.app import installed_version

    return context.answer({"version": installed_version()}, f"atoll {installed_version()}")
