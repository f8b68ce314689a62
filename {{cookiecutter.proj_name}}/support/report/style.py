"""The style of a report: light and dark, wide and narrow screens, paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1a1f26; --soft: #5d6775; --line: #dfe3e8; --faint: #eef0f3;
  --good: #14773c; --good-paper: #dcf3e4; --bad: #b42318; --bad-paper: #fde4e1; --busy: #8a5a00; --busy-paper:
    #fbeecb;
  --c0: #2563c9; --c1: #d9540b; --c2: #0b8a5f; --c3: #b02a7f; --c4: #6d4bd1; --c5: #8f6b00; --c6: #0a7f96; --c7:
    #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #11151a; --card: #1a2027; --ink: #e7eaee; --soft: #9aa5b3; --line: #303944; --faint: #232b34;
    --good: #5fd08c; --good-paper: #153524; --bad: #ff8d80; --bad-paper: #45201c; --busy: #f0c04f; --busy-paper:
    #3c2f10;
    --c0: #6ea8ff; --c1: #ff9a5c; --c2: #4fd1a1; --c3: #f07fc4; --c4: #b09bff; --c5: #e3c04b; --c6: #56c8de; --c7:
    #a8b0bb;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto,
  "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; display: flex; flex-wrap: wrap;
  align-items: center; gap: 6px 12px; }
h2 { font-size: 17px; margin: 36px 0 12px; }
.about { color: var(--soft); margin: 6px 0 0; overflow-wrap: anywhere; }
.state { font-size: 13px; font-weight: 600; border-radius: 99px; padding: 2px 11px; background: var(--faint); }
.state.finished { color: var(--good); background: var(--good-paper); }
.state.failed, .state.killed { color: var(--bad); background: var(--bad-paper); }
.state.running, .state.stopped { color: var(--busy); background: var(--busy-paper); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 22px 0 0;
  padding: 0;
  list-style: none; }
.cards li, figure, .scroll, details, .notes { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.cards li { padding: 12px 16px; }
.cards b { display: block; font-size: 25px; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums;
  }
.cards span { display: block; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
.cards .main { border-color: var(--good); box-shadow: inset 0 0 0 1px var(--good); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 14px 6px; min-width: 0; }
figcaption { font-weight: 600; }
figcaption small { color: var(--soft); font-weight: 400; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; padding: 0; list-style: none;
  font-size: 13px;
  color: var(--soft); }
.legend li { overflow-wrap: anywhere; }
.legend li::before { content: ""; display: inline-block; width: 16px; height: 3px; border-radius: 2px; margin: 0
  6px 3px 0;
  background: var(--colour); vertical-align: middle; }
.legend li.faint::before { opacity: 0.35; }
.legend li.dots::before { background: repeating-linear-gradient(90deg, var(--colour) 0 4px, transparent 4px 6px); }
.legend li.best::before { width: 9px; height: 9px; border-radius: 50%; border: 2px solid var(--ink); background:
  none; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; }
svg polyline { fill: none; stroke: var(--colour); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg polyline.faint { stroke-width: 1.2; opacity: 0.35; }
svg .dots polyline { stroke-dasharray: 2 5; }
svg circle { fill: var(--colour); }
svg line.best { stroke: var(--ink); stroke-dasharray: 3 4; opacity: 0.6; }
svg circle.best { fill: none; stroke: var(--ink); stroke-width: 2; }
.c0 { --colour: var(--c0); } .c1 { --colour: var(--c1); } .c2 { --colour: var(--c2); } .c3 { --colour: var(--c3); }
.c4 { --colour: var(--c4); } .c5 { --colour: var(--c5); } .c6 { --colour: var(--c6); } .c7 { --colour: var(--c7); }
.scroll { overflow-x: auto; }
.scroll + .scroll { margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 7px 14px; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 600; font-size: 13px; white-space: nowrap; }
tbody th { font-weight: 500; }
td { overflow-wrap: break-word; min-width: 64px; font-variant-numeric: tabular-nums; }
.attempts th, .attempts td:not(:last-child) { white-space: nowrap; }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; white-space: nowrap; }
.dot::before { content: ""; display: inline-block; width: 11px; height: 11px; border-radius: 50%; margin-right: 8px;
  background: var(--colour); }
td b { color: var(--good); }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
pre { margin: 0; padding: 4px 16px 14px; overflow-x: auto; }
details { margin-top: 12px; }
summary { cursor: pointer; padding: 10px 16px; font-weight: 600; }
details .scroll { border: 0; border-top: 1px solid var(--line); border-radius: 0 0 10px 10px; }
.pictures { display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 14px; padding: 0; list-style: none; }
.pictures li { max-width: 100%; overflow-wrap: anywhere; font-size: 13px; color: var(--soft); }
.pictures img { display: block; max-width: 100%; height: auto; border-radius: 6px; border: 1px solid var(--line);
  background: #fff; }
h3 { font-size: 14px; color: var(--soft); font-weight: 600; margin: 0 0 8px; }
.notes { margin: 18px 0 0; padding: 12px 16px; border-color: var(--busy); overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; margin-top: 40px; overflow-wrap: anywhere; }
@media (max-width: 600px) {
  main { padding: 18px 12px 40px; }
  h1 { font-size: 21px; }
  .cards { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .cards li { padding: 10px 12px; }
  .cards b { font-size: 20px; }
  svg text { font-size: 16px; }
  th, td { padding: 6px 10px; }
}
@media print {
  :root { --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --faint: #eee; --c0: #1f4fb0; --c1:
    #b8430a;
    --c2: #08704c; --c3: #8d1f66; --c4: #5636b3; --c5: #6f5300; --c6: #076577; --c7: #555; --good: #0d5c2d; --bad:
    #8f1a11;
    --busy: #6b4500; --good-paper: #fff; --bad-paper: #fff; --busy-paper: #fff; }
  body { font-size: 12px; }
  main { max-width: none; padding: 0; }
  .charts { grid-template-columns: 1fr 1fr; }
  figure, .cards li, tr, .pictures li { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
