"""An evaluation of Inspect whose model works in sandboxes of Atoll. A script stands for the model, so it runs offline.

    pip install '/path/to/atoll[inspect]'
    python examples/integrations/inspect_evaluation.py

With a model, the same task is `inspect eval examples/integrations/inspect_evaluation.py --model PROVIDER/MODEL`.
"""

from __future__ import annotations

import tempfile

import inspect_ai
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

import atoll
from atoll.integrations.inspect_ai import AtollSandboxConfig

CONFIG = AtollSandboxConfig(limits=atoll.Limits(memory_bytes=512 << 20, pids=128))


@task
def largest_file() -> Task:
    texts = {"b.txt": "b" * 2000, "a.txt": "a", "c.txt": "c" * 30}
    sample = Sample(
        "Which file in ~/data is the largest?", target="b.txt", files={f"data/{n}": c for n, c in texts.items()}
    )
    return Task(
        dataset=[sample],
        solver=[use_tools(bash(timeout=30)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("atoll", CONFIG),
    )


def main() -> None:
    script = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "ls -S data | head -1"}),
        ModelOutput.from_content("mockllm/model", "It is b.txt."),
    ]
    for output in script:
        output.usage = ModelUsage()  # otherwise Inspect counts tokens, for which it fetches a vocabulary
    model = get_model("mockllm/model", custom_outputs=script)
    with tempfile.TemporaryDirectory() as log_dir:
        [log] = inspect_ai.eval(largest_file(), model=model, log_dir=log_dir, display="none")
        assert log.samples, log.error
        [sample] = log.samples
    assert sample.scores
    answers = [message.text for message in sample.messages if message.role == "tool"]
    print(f"{log.status}: the sandbox answered {answers}; the score is {sample.scores['includes'].value}")


if __name__ == "__main__":
    main()
