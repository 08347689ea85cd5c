"""The five services, one module each: what each process is composed of. Their loops are in `run.loops`."""
