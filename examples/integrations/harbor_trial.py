"""A task of Terminal-Bench's kind, tried by Harbor in a sandbox of Atoll.

    python examples/integrations/harbor_trial.py

The agent is Harbor's oracle, which runs the task's own solution, so this runs offline. The same from a shell:

    harbor run --path examples/integrations/harbor_task --agent oracle --env atoll.integrations.harbor:AtollEnvironment
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

TASK = Path(__file__).with_name("harbor_task")
ENVIRONMENT = "atoll.integrations.harbor:AtollEnvironment"


async def play(trials: Path, agent: AgentConfig | None = None, **options: Any) -> TrialResult:
    """Try the task once. `options` are those of the environment; what the trial leaves is below `trials`."""
    config = TrialConfig(
        task=TaskConfig(path=TASK),
        trials_dir=trials,
        agent=agent or AgentConfig(name="oracle"),
        environment=EnvironmentConfig(import_path=ENVIRONMENT, kwargs=options),
    )
    trial = await Trial.create(config)
    return await trial.run()


def main() -> None:
    with tempfile.TemporaryDirectory() as trials:
        result = asyncio.run(play(Path(trials)))
        print(result.verifier_result.rewards if result.verifier_result else result.exception_info)


if __name__ == "__main__":
    main()
