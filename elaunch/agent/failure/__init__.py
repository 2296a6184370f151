"""From the ends of a round's workers to a report whose first line is the cause.

``ends`` sorts who failed by itself from who was made to end; ``explain`` with its table ``causes``,
``tracebacks`` and ``errorfile`` find out why; ``report`` writes it for people, and ``reporter``
does so at the two moments when the parts are at hand.
"""

__all__ = ["ends", "errorfile", "explain", "report", "reporter"]
