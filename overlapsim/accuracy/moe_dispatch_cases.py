"""Cases."""
from overlapsim.accuracy.suite import Row
def case_rows() -> tuple[Row, ...]:
    return ()
