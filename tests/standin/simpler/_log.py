"""The logger ``simpler`` and its extra levels; a host silences the runtime through it."""

import logging

TIMING = 25
NUL = 60
DEFAULT_THRESHOLD = TIMING

for _level, _name in ((TIMING, "TIMING"), (NUL, "NUL")):
    logging.addLevelName(_level, _name)

_LOGGER = logging.getLogger("simpler")
if _LOGGER.level == logging.NOTSET:
    _LOGGER.setLevel(DEFAULT_THRESHOLD)


def get_logger() -> logging.Logger:
    """The logger of the package."""
    return _LOGGER


def get_current_config() -> int:
    """The threshold that children will use, rounded up to a level that exists."""
    effective = _LOGGER.getEffectiveLevel()
    for level in (logging.DEBUG, logging.INFO, TIMING, logging.WARNING, logging.ERROR):
        if effective <= level:
            return level
    return NUL
