"""Downloads from the hub tell whoever watches how far they have come, in place of the hub's own bars."""

from __future__ import annotations

from typing import Any

from rollout_core.base.watching import current_amount


def watched_downloads() -> Any:
    """What ``snapshot_download`` takes as ``tqdm_class``. Of its bars that of the bytes that are written counts."""
    from tqdm import tqdm

    amount = current_amount()  # the files are fetched by threads

    class Download(tqdm):  # pyright: ignore[reportMissingTypeArgument] - it has none when it runs
        """Draws nothing. The total grows with each file that is begun."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = str(options.get("desc", "")).startswith("Reconstructing")
            self._told = 0
            # The hub's own arguments, such as the name of a bar, are none of tqdm's.
            super().__init__(*args[:1], total=options.get("total"), disable=True)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                total = int(self.total or 0)
                amount.expect(max(0, total - self._told))
                self._told = max(self._told, total)
                amount.add(int(n))
            return None

    return Download
