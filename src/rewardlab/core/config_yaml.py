"""Read YAML as settings need it: text, numbers, booleans, lists and mappings, each key once, of a bounded size.

Dates, times such as 12:00:00 and numbers that begin with a zero are read as text. Aliases and merge keys work as in
YAML, but what they expand to is limited: a file of a few lines can otherwise expand to billions of values ("billion
laughs").
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml
from yaml import MappingNode, Node, SafeLoader, ScalarNode, SequenceNode, YAMLError
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from rewardlab.core.terminal import brief

MOST_VALUES: Final = 10_000
"""Most values in a file, and in what its aliases expand to."""
MERGE: Final = "tag:yaml.org,2002:merge"
DATE: Final = "tag:yaml.org,2002:timestamp"
TEXT: Final = "tag:yaml.org,2002:str"
MISREAD: Final = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)\Z")
"""What YAML 1.1 reads as numbers of base 8 or 60: 010 would be 8, and 1:30 would be 90."""


def parse_yaml(text: str) -> object:
    """Return the value in a text. Raises ValueError saying what is wrong, RecursionError for too deep nesting."""
    try:
        # `_Loader` is a SafeLoader, so nothing in the file is executed.
        return yaml.load(text, Loader=_Loader)
    except _TwiceError as error:
        raise ValueError(str(error)) from error
    except YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


class _TwiceError(YAMLError):
    """A mapping has the same key twice."""


class _Loader(SafeLoader):
    """Loader that adds checks to PyYAML's passes: composing nodes, resolving their types, constructing values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # PyYAML would turn `2024-01-01` into a date. No setting is a date, but the name of a folder may look like one.
        # What the first pattern that matches says is taken.
        self.yaml_implicit_resolvers = {
            first: [(TEXT, MISREAD), *((tag, pattern) for tag, pattern in rules if tag != DATE)]
            for first, rules in SafeLoader.yaml_implicit_resolvers.items()
        }
        self._num_nodes = 0

    def get_single_node(self) -> Node | None:
        """Return the document. Raises ComposerError if it is too large once its aliases are expanded."""
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {}, set())
        return node

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose one node. Raises YAMLError if the file has more than `MOST_VALUES`."""
        self._num_nodes += 1
        if self._num_nodes > MOST_VALUES:
            raise YAMLError(f"more than {MOST_VALUES:,} values")
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping. Raises _TwiceError if a key appears twice: PyYAML would silently keep the last value."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                how = "Merge a list: <<: [*first, *second]" if key.tag == MERGE else "Keep one"
                raise _TwiceError(f"line {line}: the key {brief(key.value)} appears twice. {how}.")
            seen.add(key.value)
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        """Put what a mapping merges before its own keys. Raises ConstructorError if it merges anything but mappings.

        A mapping's own key wins over a merged one, and of a list of merged mappings the first that has the key, as the
        merge key's specification says: releases of PyYAML differ in this.
        """
        asked = next((value for key, value in node.value if key.tag == MERGE), None)
        if asked is not None:
            merged: list[tuple[Node, Node]] = []
            for source in reversed(asked.value if isinstance(asked, SequenceNode) else [asked]):
                if not isinstance(source, MappingNode):
                    problem = f"expected a mapping or a list of mappings to merge, found a {source.id}"
                    raise ConstructorError("while constructing a mapping", node.start_mark, problem, source.start_mark)
                self.flatten_mapping(source)
                merged += source.value
            node.value = merged + [pair for pair in node.value if pair[0].tag != MERGE]
        super().flatten_mapping(node)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Construct a value. Where PyYAML fails, such as at `!!int word`, raise ConstructorError with the line."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            problem = f"cannot be read as {node.tag.rpartition(':')[2]} ({error})"
            raise ConstructorError(None, None, problem, node.start_mark) from error


def _count_values(node: Node, counted: dict[int, int], open_nodes: set[int]) -> int:
    """Count the values in a node, each alias as everything that it stands for.

    Raises ComposerError if an alias contains itself, or if the count exceeds `MOST_VALUES`.
    """
    if id(node) in open_nodes:
        raise ComposerError(None, None, "an alias refers to a value that contains it", node.start_mark)
    if id(node) not in counted:
        open_nodes.add(id(node))
        inside = [] if isinstance(node, ScalarNode) else node.value
        if isinstance(node, MappingNode):
            inside = [part for pair in inside for part in pair]
        counted[id(node)] = 1 + sum(_count_values(part, counted, open_nodes) for part in inside)
        open_nodes.remove(id(node))
    if counted[id(node)] > MOST_VALUES:
        problem = f"its aliases expand to more than {MOST_VALUES:,} values"
        raise ComposerError(None, None, problem, node.start_mark)
    return counted[id(node)]
