"""What a resume says of the data: the samples whose checksums a checkpoint holds are read again."""

from collections.abc import Mapping

from common.checkpoint.resume import Comparison
from parts.data_check.checksum import different
from parts.data_check.reading import Reading


def compare_data(old: Mapping[str, Reading], new: Mapping[str, Reading], found: Comparison) -> None:
    """Add how the data differ, and how much of them was compared."""
    if not old:
        found.unknown.append("the data, of which the checkpoint has no checksums")
    same = 0
    total = 0
    for name, now in new.items():
        if name not in old:
            continue
        before = old[name]
        data = f"dataset.{name}"
        varies = now["varies"] or before["varies"]
        unread = now["unread"] or before["unread"]
        both = [number for number in before["samples"] if number in now["samples"]]
        differing = [number for number in both if before["samples"][number] != now["samples"][number]]
        other = ""
        if before["size"] and now["size"] and before["size"] != now["size"]:
            other = f"{data}: {before['size']:,} samples -> {now['size']:,}"
        elif differing and not varies:
            number = differing[0]
            entries = different(before["samples"][number], now["samples"][number])
            more = f"{len(differing)} of {len(both)} samples read again differ"
            other = f"sample {number} of {data}: {entries} differs ({more})"
        if other and name.startswith("val"):
            found.bits.append(other)
        elif other:
            found.samples.append(other)
        elif unread:
            found.unknown.append(f"{data}: {unread}")
        elif varies:
            found.bits.append(f"{data}: reading twice gives two values, {varies}")
        else:
            same += len(both)
            total += now["size"]
    if same:
        found.compared.append(f"data ({same:,} of {total:,} samples read again: the same)")
