"""Outside the engine: what people drive. The ``tightframe`` command, job recipes."""
