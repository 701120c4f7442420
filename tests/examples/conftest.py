"""The small digits data of tests/data, for the tests of the program that writes it."""

from tests.data.conftest import chat as chat
from tests.data.conftest import digits as digits
