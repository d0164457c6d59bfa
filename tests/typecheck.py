"""The run-time type checker of the test suite: an int is fine where a float is wanted, as for mypy."""

from beartype import BeartypeConf
from beartype import beartype as decorate

beartype = decorate(conf=BeartypeConf(is_pep484_tower=True))
