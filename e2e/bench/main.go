// Command bench measures what the product promises in numbers, with the real programs, and compares it with the least
// that the same work can cost. `make bench` runs it; the rows of one subject are in one file.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"
)

// rows are all rows, in the order of the table.
func rows() []Row {
	return slices.Concat(nodeRows(), imageRows(), hubRows(), reconnectRows(), apiRows(), eventRows(), breakRows(),
		usageRows(), memoryRows(), policyRows(), simulationRows())
}

func main() {
	var pick string
	var samples int
	var out string
	flag.StringVar(&pick, "row", "", "measure the rows whose name matches this regular expression only")
	flag.IntVar(&samples, "n", 0, "take at most this many samples of each, while developing; nothing is written then")
	flag.StringVar(&out, "json", "", "write the results of this run into this file as well")
	var params Params
	params.register(flag.CommandLine)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, pick, samples, out, params); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run measures the rows; a row that fails does not stop the others.
func run(ctx context.Context, pick string, samples int, out string, params Params) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("containers and network namespaces need root")
	}
	chosen, err := regexp.Compile(pick)
	if err != nil {
		return err
	}
	source, err := os.Getwd()
	if err != nil {
		return err
	}
	e, err := newEnv(source, samples)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	e.Params = params
	now, err := conditions(ctx, source)
	if err != nil {
		return err
	}
	var results []Result
	var known []string
	var errs []error
	for _, row := range rows() {
		known = append(known, row.Name)
		if !chosen.MatchString(row.Name) || row.Long && pick == "" || ctx.Err() != nil {
			continue
		}
		e.Say("measuring %s", row.Name)
		before := loadAverage()
		found, err := row.Measure(ctx, e)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", row.Name, err))
		}
		for i := range found {
			found[i].MeasuredAt = time.Now().UTC().Truncate(time.Second)
			under := now
			under.LoadBefore, under.LoadAfter = before, loadAverage()
			found[i].Conditions = &under
		}
		results = append(results, found...)
	}
	markOthers(results, now.Commit)
	errs = append(errs, ctx.Err(), printTable(os.Stdout, results))
	if out != "" {
		errs = append(errs, writeJSON(out, results))
	}
	if !e.Quick() && ctx.Err() == nil {
		dir := filepath.Join(source, "bench")
		errs = append(errs, keep(filepath.Join(dir, "results.json"), now.Commit, results, known),
			keepRaw(filepath.Join(dir, "samples"), results))
	}
	return errors.Join(errs...)
}
