"""Scripts that write words without blanks, and marks that belong to the letter before them."""

from __future__ import annotations

import re
import unicodedata

# Characters, as ranges of regular expressions: of Thai, Lao, Burmese, Khmer, Japanese and Chinese,
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
# and of these and the other scripts of India and Southeast Asia, whose vowels combine with letters.
ALL = UNSPACED + "\u0900-\u109f\u1700-\u1aaf\u1b00-\u1bff\ua800-\uaaff"
MARKS = "".join(
    c for c in re.findall(f"[{ALL}]", "".join(map(chr, range(0xAB00)))) if unicodedata.category(c)[0] == "M"
)
LETTER = f"[{UNSPACED}][{MARKS}]*"  # of a script without blanks
