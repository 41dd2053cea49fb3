"""Does a packed batch leak in this model, where does it begin, and why: :func:`leak_report`."""

# ``python -m leak_report`` in a variant's folder imports this folder alone; __main__ then loads the whole package.
if __package__ != "leak_report":
    from .report import LayerResult, LeakReport
    from .run import leak_report

    __all__ = ["LayerResult", "LeakReport", "leak_report"]
