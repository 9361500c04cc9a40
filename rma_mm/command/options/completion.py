"""Completion scripts for shells, made from the options of all commands."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import import_module

from rma_mm.classes import dataclass
from rma_mm.command.options.commands import COMMANDS
from rma_mm.command.options.parser import Parser

PROGRAM = "rma-mm completion"
ABOUT = "Print a script by which a shell completes the commands and options of rma-mm."
EPILOG = """\
examples:
  source <(rma-mm completion bash)    in this bash; add the line to ~/.bashrc for all
  source <(rma-mm completion zsh)     in zsh, after compinit; add the line to ~/.zshrc for all

exit codes:
  0  done
  2  wrong arguments"""
BASH = """\
_rma_mm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if ((COMP_CWORD == 1)); then
        words={commands}
    else
        case ${{COMP_WORDS[1]}}:$before in
{values}
        *)
            case ${{COMP_WORDS[1]}} in
{options}
            esac
            [[ $word == -* || ${{COMP_WORDS[1]}} == completion || ${{COMP_WORDS[1]}} == cache ]] || words=
            ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _rma_mm rma-mm
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class CompletionOptions:
    shell: str | None  # "bash" or "zsh"; None for help
    help: bool


def parser() -> Parser:
    """Return the parser of this command."""
    made = Parser(PROGRAM, f"{PROGRAM} bash|zsh", ABOUT, EPILOG)
    add = made.group("options")
    add("shell", nargs="?", choices=["bash", "zsh"], help="the shell")
    add("-h", "--help", action="store_true", help="print this help")
    return made


def parse(argv: Sequence[str]) -> CompletionOptions:
    return CompletionOptions(**vars(parser().parse_args(argv)))


def text(options: CompletionOptions) -> str:
    """Return the script, or the help where no shell is named."""
    if options.help or not options.shell:
        return parser().format_help()
    return (ZSH if options.shell == "zsh" else "") + _bash()


def _bash() -> str:
    """Return the script for bash, which zsh reads too."""
    values, options = [], []
    for name in COMMANDS:
        made: Parser = import_module(f"rma_mm.command.options.{name}").parser()
        plain = [str(choice) for action in made.actions if not action.option_strings for choice in action.choices or ()]
        options.append(f"            {name}) words={shlex.quote(' '.join((*made.words, *plain)))};;")
        for action in made.actions:
            if action.option_strings and action.choices:
                where = " | ".join(f"{name}:{word}" for word in action.option_strings)
                values.append(f"        {where}) words={shlex.quote(' '.join(map(str, action.choices)))};;")
    names = shlex.quote(" ".join((*COMMANDS, "--help", "--version")))
    return BASH.format(commands=names, values="\n".join(values), options="\n".join(options))
