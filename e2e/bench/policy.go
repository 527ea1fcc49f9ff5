package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
)

// policyDecisions is how many decisions are measured for each number of projects.
const policyDecisions = 100_000

// costOfDecision is a line that BenchmarkDecide prints.
var costOfDecision = regexp.MustCompile(
	`(?m)^BenchmarkDecide/projects=(\d+)\S*\s+(\d+)\s.*?([0-9.]+) p50-µs\s+([0-9.]+) p99-µs`)

func policyRows() []Row { return []Row{{Name: "policy-decision", Measure: measureDecisions}} }

// measureDecisions runs the benchmark of the policies, which only the hub may import.
func measureDecisions(ctx context.Context, e *Env) ([]Result, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^BenchmarkDecide$",
		"-benchtime", fmt.Sprint(e.Samples(policyDecisions), "x"), "./hub/internal/iam")
	cmd.Dir = e.Source
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, out[max(0, len(out)-2000):])
	}
	var results []Result
	for _, found := range costOfDecision.FindAllSubmatch(out, -1) {
		n, err1 := strconv.Atoi(string(found[2]))
		p50, err2 := strconv.ParseFloat(string(found[3]), 64)
		p99, err3 := strconv.ParseFloat(string(found[4]), 64)
		if err := errors.Join(err1, err2, err3); err != nil {
			return nil, err
		}
		results = append(results, Result{
			Name:    "policy-decision." + string(found[1]),
			What:    "one decision by the policies for a user with a role in projects: " + string(found[1]),
			Unit:    "µs",
			N:       n,
			P50:     p50,
			P99:     p99,
			Target:  "p50 ≤ 20",
			Reached: p50 <= 20,
		})
	}
	if len(results) != 3 {
		return nil, fmt.Errorf("the benchmark printed no cost: %s", out[max(0, len(out)-2000):])
	}
	// Flat: ten thousand projects cost what one does, within what memory does to the times.
	one, many := results[0], results[2].against(results[0].P50)
	many.Target, many.Reached = "p50 ≤ 20 and ≤ 1.5 × baseline", many.P50 <= 20 && many.P50 <= 1.5*one.P50
	results[2] = many
	return results, nil
}
