"""`doctor` and `version`: this machine, and this installation."""

from __future__ import annotations

import atoll
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import CommandContext, CommandModule

commands = CommandModule()


@commands.command()
async def doctor(context: CommandContext) -> int:
    """Show what works on this machine, and how to fix the rest.

    The exit status is 1 if no runtime works.
    """
    async with context.open_engine() as engine:
        found = engine.doctor()
        drivers = engine.drivers()
        working = list(drivers)
        by_name = {name for name, driver in drivers.items() if not driver.capabilities.chosen_by_default}
        state_dir = engine.state_dir
    if context.as_json:
        diagnostics = [each.model_dump(mode="json") for each in found]
        render.emit_json({"runtimes": working, "state_dir": str(state_dir), "diagnostics": diagnostics})
    else:
        render.diagnostics([(each.ok, each.topic, each.detail, each.fix) for each in found])
        render.say("")
        if working:
            shown = [f"{name} (only by name)" if name in by_name else name for name in working]
            render.say(f"runtimes that work: {', '.join(shown)}")
        else:
            render.say("no runtime works, so no sandbox can be created; apply the fixes above")
    return 0 if working else FAILED


@commands.command()
def version(context: CommandContext) -> int:
    """Print the version."""
    return context.answer({"version": atoll.__version__}, f"atoll {atoll.__version__}")
