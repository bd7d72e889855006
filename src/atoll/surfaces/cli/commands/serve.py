"""`serve`: the server for programs elsewhere. `config`: its settings, and where each came from.

Not here: the server (`surfaces/serve/`).
"""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import CallerError, InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.grammar import Option

if TYPE_CHECKING:
    from atoll.surfaces.serve.settings import LoadedSettings

commands = CommandModule()
_CONFIG = Option(
    "--config",
    metavar="FILE",
    help="Settings as TOML.  [default: /etc/atoll/server.toml for root, else atoll/server.toml below $XDG_CONFIG_HOME "
    "or ~/.config, if it is there]",
)


class _ServeCommand(AtollCommand):
    """Its `--tls-self-signed` may be given without names."""

    json_help = "Print the URL, and the key that was made, as one JSON object."

    def prepared(self, words: list[str]) -> list[str]:
        prepared = list(words)
        for index, word in enumerate(words):
            if word == "--tls-self-signed" and (index + 1 == len(words) or words[index + 1].startswith("-")):
                prepared[index] = "--tls-self-signed="
        return prepared


@commands.command(cls=_ServeCommand)
def serve(
    context: CommandContext,
    listen: Annotated[
        str | None, Option("--listen", metavar="ADDRESS:PORT", help="Where to listen.  [default: 127.0.0.1:8080]")
    ] = None,
    tls_cert: Annotated[
        Path | None, Option("--tls-cert", metavar="FILE", help="Use TLS, with this certificate (PEM, with its chain).")
    ] = None,
    tls_key: Annotated[Path | None, Option("--tls-key", metavar="FILE", help="The certificate's key (PEM).")] = None,
    tls_self_signed: Annotated[
        str | None,
        Option(
            "--tls-self-signed",
            metavar="[NAME,…]",
            help="Use TLS with a certificate of our own, for previews, loopback and these names.",
        ),
    ] = None,
    domain: Annotated[
        str | None,
        Option("--domain", metavar="DOMAIN", help="Previews are at PORT-NAME.DOMAIN.  [default: atoll.localhost]"),
    ] = None,
    config: Annotated[Path | None, _CONFIG] = None,
    install: Annotated[
        bool, Option("--install", help="Write a systemd unit that serves with these options, and start nothing.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="With --install: print the unit instead.")] = False,
) -> Work | int:
    """Serve sandboxes and agents to programs elsewhere.

    REST, chat with agents, MCP, E2B's API and previews are on one port; /docs is a page about the REST API.
    Prints its URL and, the first time, the key of its administrator, once. Sandboxes go on when it ends. Signals:
    SIGTERM ends it in order, SIGHUP reads certificates again. docs/deploy.md is about running it as a service.

    \b
    atoll serve
    atoll serve --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem --domain example.com
    """
    flags: dict[str, Any] = {"listen": listen, "tls_cert": tls_cert, "tls_key": tls_key, "domain": domain}
    if tls_self_signed is not None:
        flags["tls_self_signed"] = tuple(filter(None, map(str.strip, tls_self_signed.split(","))))
    loaded = _load(context, flags, config)
    if dry_run and not install:
        raise InvalidRequest("--dry-run belongs to --install; leave it out, or give both")
    if install:
        return _install(context, loaded, config, dry_run=dry_run)
    return _serve(context, loaded)


def _install(context: CommandContext, loaded: LoadedSettings, config: Path | None, *, dry_run: bool) -> int:
    import tempfile

    from atoll.surfaces.serve import unit

    settings = loaded.settings
    flags = {each.name: each.value for each in loaded.shown() if each.origin.startswith("--")}
    state_dir = settings.resolve_state_dir()
    arguments = [f"--state-dir={state_dir}"]
    for name, value in flags.items():
        if name != "state_dir":
            arguments.append(f"--{name.replace('_', '-')}={','.join(value) if isinstance(value, list) else value}")
    if config is not None:
        arguments.append(f"--config={config.resolve()}")
    text = unit.unit_text(arguments, state_dir)
    with tempfile.TemporaryDirectory() as directory:
        wrong = unit.check(text, Path(directory))
    if wrong is not None:
        raise CallerError(f"systemd does not accept the unit: {wrong}")
    if dry_run:
        return context.answer({"path": str(unit.SYSTEM), "unit": text}, text.rstrip())
    unit.write(text)
    return context.answer(
        {"path": str(unit.SYSTEM), "unit": text},
        f"{unit.SYSTEM} is written; start it with: systemctl daemon-reload && systemctl enable --now atoll",
    )


async def _serve(context: CommandContext, loaded: LoadedSettings) -> int:
    from atoll.surfaces.cli import terminal

    gc.disable()  # nothing is garbage while modules are imported and routes are made
    with needing_extra("the server", "server"):
        from atoll.surfaces.serve import logs, process
        from atoll.surfaces.serve.tls import how_to_trust

        def announce(ready: process.ReadyServer) -> None:
            gc.freeze()  # what is there now stays: looking through it takes a tenth of a second each time
            gc.enable()
            key = None if ready.first_key is None else ready.first_key.get_secret_value()
            authority = None if ready.authority is None else str(ready.authority)
            if context.as_json:
                render.emit_json({"url": ready.url, "key": key, "authority": authority})
            else:
                render.say(ready.url)
                if key is not None:
                    render.say(f"The administrator's key, which is shown this once: {key}")
                    render.say(f"For commands elsewhere: export ATOLL_URL={ready.url} ATOLL_API_KEY=KEY")
                    render.say(f"For programs: {ready.url}/docs")
                if ready.authority is not None:
                    render.say(how_to_trust(ready.authority))
            sys.stdout.flush()

        logs.configure(loaded.settings.log_format, loaded.settings.log_level)
        with terminal.instead_of_ending(signal.SIGHUP) as on_hangup:
            await process.serve(loaded.settings, on_ready=announce, on_reload=on_hangup.append)
    return 0


@commands.command()
def config(context: CommandContext, config: Annotated[Path | None, _CONFIG] = None) -> int:
    """Show the settings of `atoll serve`, and where each came from."""
    loaded = _load(context, {}, config)
    shown = loaded.shown()
    lines = render.table_lines(
        ("SETTING", "VALUE", "FROM"), [(each.name, _text(each.value), each.origin) for each in shown], flex=1
    )
    return context.answer(
        [{"name": each.name, "value": each.value, "origin": each.origin} for each in shown], "\n".join(lines)
    )


def _text(value: object) -> str:
    if value is None:
        return "unset"
    if value in ("", []):
        return "none"
    return (
        ",".join(map(str, value))
        if isinstance(value, list)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


def _load(context: CommandContext, flags: dict[str, Any], config: Path | None) -> LoadedSettings:
    from atoll.surfaces.serve.settings import load

    given = {name: value for name, value in flags.items() if value is not None}
    if context.state_dir is not None:
        given["state_dir"] = Path(context.state_dir)
    return load(given, config)
