"""From the ends of a round's workers to a report whose first line is the cause.

``evidence`` is how they ended, with what they left: ``explain`` with its table ``causes``,
``tracebacks`` and ``errorfile`` find out why each did. ``verdict`` decides by that who failed by
itself and who is to blame; ``report`` writes it for people, and ``reporter`` does so at the two
moments when the parts are at hand.
"""

__all__ = ["errorfile", "explain", "report", "reporter", "verdict"]
