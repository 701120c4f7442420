"""The commands of the CLI: their options, and a call of the room that does the work.

A command imports that room when it runs, so that `--help` is instant: the engine takes seconds to
import. Nothing imports commands but the CLI, which turns what they return into the exit code.
"""
