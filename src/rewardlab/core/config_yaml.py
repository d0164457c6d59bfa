"""YAML as settings need it: text, numbers, switches, lists and mappings, each key once, of a size that can be read.

A date is text. Aliases and merge keys are as in YAML, but what they stand for may not grow beyond all bounds.
"""

from __future__ import annotations

from typing import Any, Final

import yaml
from yaml import MappingNode, Node, SafeLoader, ScalarNode, YAMLError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from rewardlab.core.terminal import brief

MOST_VALUES: Final = 10_000
"""In a file, and in what its aliases make of it."""
MERGE: Final = "tag:yaml.org,2002:merge"
DATE: Final = "tag:yaml.org,2002:timestamp"


def parse_yaml(text: str) -> object:
    """The value in a text. Raises ValueError saying what is wrong, RecursionError for what is nested too deep."""
    try:
        return yaml.load(text, Loader=_Loader)  # of a SafeLoader's kind: nothing in the file is executed
    except _TwiceError as error:
        raise ValueError(str(error)) from error
    except YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


class _TwiceError(YAMLError):
    """A key that a mapping has twice."""


class _Loader(SafeLoader):
    """Reads a document in three passes of PyYAML's: nodes, what they are, values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in rules if tag != DATE]
            for first, rules in SafeLoader.yaml_implicit_resolvers.items()
        }
        self._num_nodes = 0

    def get_single_node(self) -> Node | None:
        """The document, unless it is too large once its aliases are written out."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {}, set())
        return node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """One node of a file that has not too many."""
        self._num_nodes += 1
        if self._num_nodes > MOST_VALUES:
            raise YAMLError(f"more than {MOST_VALUES:,} values")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """A mapping, each of whose keys is there once."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag == MERGE:
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise _TwiceError(f"line {line}: the key {brief(key.value)} is there twice. Keep one.")
            seen.add(key.value)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """A value; what PyYAML cannot make of it, such as a number of a word, is an error with its line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            problem = f"cannot be read as {node.tag.rpartition(':')[2]} ({error})"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def _count_values(node: Node, counted: dict[int, int], open_nodes: set[int]) -> int:
    """Values in a node, each alias counted as all it stands for; ComposerError where that has no end, or a late one."""
    if id(node) in open_nodes:
        raise ComposerError(None, None, "an alias stands inside what it stands for", node.start_mark)
    if id(node) not in counted:
        open_nodes.add(id(node))
        inside = [] if isinstance(node, ScalarNode) else node.value
        if isinstance(node, MappingNode):
            inside = [part for pair in inside for part in pair]
        counted[id(node)] = 1 + sum(_count_values(part, counted, open_nodes) for part in inside)
        open_nodes.remove(id(node))
    if counted[id(node)] > MOST_VALUES:
        problem = f"written out, its aliases make more than {MOST_VALUES:,} values"
        raise ComposerError(None, None, problem, node.start_mark)
    return counted[id(node)]
