/** Runs the rules on scenarios from standard input, one JSON object per line, and prints what they did. */

import { createInterface } from "node:readline";
import { Rules } from "../../clients/js/src/rules.js";

for await (const line of createInterface({ input: process.stdin })) {
  const { options, steps } = JSON.parse(line);
  const rules = new Rules(options);
  const results = steps.map(({ event, now, random }) => {
    const actions = rules.handle(event, now, random);
    return { actions, wakeAt: rules.wakeAt, phase: rules.phase, position: rules.position("a") };
  });
  console.log(JSON.stringify(results));
}
