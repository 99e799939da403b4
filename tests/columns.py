"""Columns of the wire and pages of a pool, as only tests write and count them."""

from ipc.tables.paged_rows import PagedRows


def pack_numbers(numbers: list[int]) -> bytes:
    """Request numbers as a uint32 column; ipc.tables.columns.unpack_numbers() reads it."""
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def num_used_pages(rows: PagedRows) -> int:
    """Pages that are not free."""
    return len(rows._flat) // rows.page_size - len(rows._free)
