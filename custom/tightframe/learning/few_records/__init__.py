"""The rule on few records: how many stand behind a number that leaves a silo, and what stays where few do."""
