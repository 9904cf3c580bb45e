"""The page's style: two themes, one column, tables that scroll on their own."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#16202c;--soft:#5a6675;--line:#dfe4ea;--good:#1a7f4b;--bad:#b3261e;
--goodbg:#e5f5ec;--badbg:#fde9e7;--s0:#0b63b0;--s1:#c25700;--s2:#0d7d5c;--s3:#9b3f8e;--s4:#7a6a00;--s5:#2a8fb8;
--s6:#6b7480;--accent:#0b63b0}
@media (prefers-color-scheme:dark){:root{--bg:#0f141a;--card:#171e26;--ink:#e8edf3;--soft:#9aa7b6;--line:#2b3541;
--good:#5fd39a;--bad:#ff8a80;--goodbg:#12301f;--badbg:#3a1917;--s0:#6cb4f5;--s1:#f5a35c;--s2:#5fd3ae;--s3:#e08fd2;
--s4:#d8c65a;--s5:#7fd3ef;--s6:#9aa7b6;--accent:#6cb4f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}h2{font-size:18px;margin:0 0 2px}
h3{font-size:14px;margin:20px 0 8px;color:var(--soft);font-weight:600}
header{margin-bottom:20px}.lead{color:var(--soft);margin:0 0 12px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 18px 20px;margin:0 0 16px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;padding:0;margin:16px 0 0;
list-style:none}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px;display:grid}
.tiles b{font-size:24px;line-height:1.25;font-variant-numeric:tabular-nums}.tiles span{font-weight:600}
small{color:var(--soft);font-size:13px}
.banner{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:baseline;border-radius:8px;padding:10px 14px;
margin:8px 0 12px}
.banner b{font-size:17px}.banner.good{background:var(--goodbg)}.banner.bad{background:var(--badbg)}
.banner.good b,.banner.good span,.mark.good{color:var(--good)}.banner.bad b,.banner.bad span,.mark.bad{color:var(--bad)}
.checks{list-style:none;margin:0;padding:0}
.checks li{display:grid;grid-template-columns:22px minmax(0,1fr);padding:6px 0;border-top:1px solid var(--line)}
.checks li:first-child{border-top:0}.checks small{grid-column:2}.mark{font-style:normal;font-weight:700}
.history{display:flex;flex-wrap:wrap;gap:4px;list-style:none;margin:0;padding:0}
.history li{width:24px;height:24px;border-radius:6px;text-align:center;line-height:24px;font-size:13px;font-weight:700}
.history .good{background:var(--goodbg);color:var(--good)}.history .bad{background:var(--badbg);color:var(--bad)}
figure{margin:8px 0 14px}.scroll{overflow-x:auto}
.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.plot svg{display:block;width:100%;min-width:560px;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:0 0 6px;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px}
.key{width:14px;height:4px;border-radius:2px;background:currentColor}
.key.crit,.key.other{height:10px}.key.crit{color:var(--s1)}.key.other{color:var(--s0);opacity:.55}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);font-size:13px;padding:4px 0 6px}
th,td{text-align:left;padding:6px 10px 6px 0;border-top:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600;font-size:13px;border-top:0;white-space:nowrap}
th.n,td.n{text-align:right;white-space:nowrap}
td.w{min-width:15em}td.k{white-space:nowrap}
details{margin-top:10px}summary{cursor:pointer;color:var(--accent);font-weight:600;font-size:14px}
.nothing{color:var(--soft);margin:6px 0 0}
.grid{stroke:var(--line)}.tick,.word,.count{font:12px system-ui,sans-serif;fill:var(--soft)}.word{fill:var(--ink)}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.hit{fill:transparent}.hit:hover{fill:currentColor}
.dot{fill:currentColor}.bar{fill:var(--s0)}.step{fill:var(--s0);opacity:.55}.step.critical{fill:var(--s1);opacity:1}
.spark{width:96px;height:24px;display:block}.spark polyline{fill:none;stroke:var(--s0);stroke-width:1.5;
vector-effect:non-scaling-stroke}
.s0{color:var(--s0)}.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}
.s5{color:var(--s5)}.s6{color:var(--s6)}
@media (min-width:760px){.checks li{grid-template-columns:22px minmax(0,1fr) minmax(0,1fr);align-items:baseline}
.checks small{grid-column:3;text-align:right}}
@media (max-width:600px){main{padding:16px 10px 40px}section{padding:14px 12px 16px}h1{font-size:22px}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
