"""What several test files share: made records, small runs, hostile parties, federations in the engine."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The project's root."""
