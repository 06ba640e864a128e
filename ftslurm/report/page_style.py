"""How the page of a report looks: colours and layout, on a wide screen and a narrow one, by day and
by night, and on paper. Data.
"""

from __future__ import annotations

from typing import Optional

from ftslurm.diagnosis import causes
from ftslurm.report.jobs import FREE

FINE = "#3f9b6c"
"""An attempt that ended well, or runs."""
SET_ASIDE = "#8fa9c4"
"""Preempted, out of time, cancelled: nobody's fault."""
BLAMED, FAILED = "#c0392b", "#e67e22"
"""Of a node and a time: failures that were blamed on it, and those that were not."""
OTHER = "#8a5a44"
COLOURS = {
    causes.NODE: "#c0392b", causes.GPU: "#e4572e", causes.STRAGGLER: "#d98cb3",
    causes.NETWORK_TRANSIENT: "#2471a3", causes.STORAGE: "#1abc9c", causes.CAPACITY: "#117a65",
    causes.OOM_HOST: "#d4ac0d", causes.OOM_GPU: "#9a7d0a", causes.CODE: "#e67e22",
    causes.DATA: "#a04000", causes.NUMERIC: "#af7ac5", causes.HANG: "#7d3c98",
    causes.CHECKPOINT: "#5d4037", causes.UNKNOWN: "#7f8c8d",
}  # fmt: skip

STYLE = """
:root{--ink:#1d2733;--soft:#566573;--line:#d8dfe6;--ground:#fff;--track:#f0f3f6;--warn:#8a5a00}
@media(prefers-color-scheme:dark){:root{--ink:#dde5ec;--soft:#9fb0bf;--line:#2f3d4a;
--ground:#12181f;--track:#1d2833;--warn:#e0b050}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);
max-width:1080px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin:0;overflow-wrap:anywhere}h2{font-size:1.15em;margin:2.2em 0 .3em}
p.sub{color:var(--soft);margin:.2em 0 .6em}p.note{color:var(--warn);margin:.3em 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(225px,1fr));gap:10px;
margin:1.2em 0}
.tile{border:1px solid var(--line);border-radius:6px;padding:10px 14px}
.tile b{display:block;font-size:1.4em}.tile span{color:var(--soft);font-size:.87em;
line-height:1.35;display:block}
.row,.axis{display:grid;grid-template-columns:190px minmax(0,1fr) 215px;column-gap:12px;
align-items:center;font-size:.87em}
.row{min-height:22px}
.of{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.at,.why{color:var(--soft)}.why{grid-column:2/4;margin-bottom:5px}
.track{position:relative;height:14px;background:var(--track);border-radius:2px;overflow:hidden}
.track i{position:absolute;top:0;bottom:0;min-width:2px}
.axis{color:var(--soft);font-size:.8em;margin:.2em 0}
.ticks{display:block;position:relative;height:1.5em;grid-column:2}
.ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.ticks span:first-child{transform:none}.ticks span:last-child{transform:translateX(-100%)}
.keys{color:var(--soft);font-size:.87em;margin:.2em 0 .6em}
.keys span{display:inline-block;margin-right:14px}
.keys i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px}
ul{padding-left:1.2em}li{margin:.5em 0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;min-width:760px;font-size:.87em}
th,td{text-align:left;padding:3px 8px;border-bottom:1px solid var(--line);vertical-align:top}
td.w{overflow-wrap:anywhere;min-width:110px}td.y{min-width:190px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
@media(max-width:700px){.tiles{grid-template-columns:1fr 1fr}
.row{grid-template-columns:minmax(0,1fr) minmax(0,auto);
margin-bottom:6px}.row .track{grid-row:2;grid-column:1/3}.row .at{text-align:right}
.why{grid-column:1/3}
.axis{display:block}.ticks span:nth-child(even){display:none}}
@media print{body{max-width:none;margin:0}.track,.track i,.keys i{print-color-adjust:exact;
-webkit-print-color-adjust:exact}}
"""


def colour(cause: Optional[str]) -> str:
    if cause is None:
        return FINE
    return SET_ASIDE if cause in FREE else COLOURS.get(cause, OTHER)
