package main

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/perf/benchmath"
)

// falseAlarm is how often a comparison of equal commits may show any difference, all lines of the row together.
const falseAlarm = 0.05

// line is what compare reads of a result of e2e/bench.
type line struct {
	Name string  `json:"name"`
	Unit string  `json:"unit"`
	P50  float64 `json:"p50"`
}

// pairs are the medians of each line, by its name.
type pairs map[string]*pair

type pair struct {
	unit   string
	a, b   []float64
	ratios []float64
}

// add takes the lines of one pair. A line that either lacks, or that is zero, has no ratio.
func (p pairs) add(a, b []line) {
	for _, before := range a {
		for _, after := range b {
			if before.Name != after.Name || before.P50 <= 0 || after.P50 <= 0 {
				continue
			}
			if p[before.Name] == nil {
				p[before.Name] = &pair{unit: before.Unit}
			}
			of := p[before.Name]
			of.a, of.b = append(of.a, before.P50), append(of.b, after.P50)
			of.ratios = append(of.ratios, after.P50/before.P50)
		}
	}
}

// verdict is the comparison of one line.
type verdict struct {
	name, unit    string
	a, b          float64
	ratio, lo, hi float64
	pairs         int
	says          string
}

const (
	saysWorse  = "regression"
	saysBetter = "improvement"
	saysNoise  = "no difference shown"
	saysTooFew = "too few pairs"
	equal      = 1 // the ratio of equal commits
)

// judge compares each line by the median of its ratios: that of a pair is not disturbed by what changes slowly on the
// machine. The interval assumes nothing of how they are distributed, and is wider the more lines are compared.
func (p pairs) judge() (all []verdict) {
	for _, name := range slices.Sorted(maps.Keys(p)) {
		of := p[name]
		confidence := 1 - falseAlarm/float64(len(p))
		median := func(values []float64) benchmath.Summary {
			sample := benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds)
			return benchmath.AssumeNothing.Summary(sample, confidence)
		}
		ratio := median(of.ratios)
		v := verdict{
			name:  name,
			unit:  of.unit,
			a:     median(of.a).Center,
			b:     median(of.b).Center,
			ratio: ratio.Center,
			lo:    ratio.Lo,
			hi:    ratio.Hi,
			pairs: len(of.ratios),
			says:  saysNoise,
		}
		higher, lower := saysWorse, saysBetter
		if strings.HasSuffix(of.unit, "/s") {
			higher, lower = saysBetter, saysWorse
		}
		switch {
		case math.IsInf(v.lo, 0) || math.IsInf(v.hi, 0) || math.IsNaN(v.lo):
			v.says = saysTooFew
		case v.lo > equal:
			v.says = higher
		case v.hi < equal:
			v.says = lower
		}
		all = append(all, v)
	}
	return all
}

func anyWorse(all []verdict) bool {
	return slices.ContainsFunc(all, func(v verdict) bool { return v.says == saysWorse })
}

// show writes a table.
func show(out io.Writer, all []verdict) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "LINE\tPAIRS\tA\tB\tUNIT\tB / A\tINTERVAL\tVERDICT")
	for _, v := range all {
		_, _ = fmt.Fprintf(w, "%s\t%d\t%.4g\t%.4g\t%s\t%.3f\t%.3f to %.3f\t%s\n", v.name, v.pairs, v.a, v.b, v.unit,
			v.ratio, v.lo, v.hi, v.says)
	}
	return w.Flush()
}
