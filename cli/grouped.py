"""Options that a command takes together: typer reads one signature, the command gets one object for each group.

A group is a frozen dataclass whose fields are annotated as typer wants its parameters. A command with twenty options
so has a few arguments, each of which knows what it stands for.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def grouped(*groups: type[Any] | Iterable[inspect.Parameter]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the options of its groups, in their order.

    Args:
        groups: One for each argument of the command: a dataclass, of which it gets an instance, or parameters, of which
            it gets a dict. What else the command takes follows, as it is.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        members = [group if not isinstance(group, type) else _parameters(group) for group in groups]
        listed = [list(each) for each in members]
        others = list(inspect.signature(function, eval_str=True).parameters.values())[len(groups) :]

        def command(**given: Any) -> R:
            made = []
            for group, parameters in zip(groups, listed, strict=True):
                values = {each.name: given.pop(each.name) for each in parameters}
                made.append(group(**values) if isinstance(group, type) else values)
            return function(*made, **given)

        signature = [each for parameters in listed for each in parameters]
        signature += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
        command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # what `inspect` looks for
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    """Return one option: a name, an annotation as typer reads it, and the value without it.

    Args:
        name: With underscores, as in Python.
        annotation: `Annotated` with a typer option.
        default: What the command gets without it.
    """
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [parameter(key.name, hints[key.name], _default(key)) for key in fields(group)]


def _default(key: Field[Any]) -> object:
    return inspect.Parameter.empty if key.default is MISSING else key.default
