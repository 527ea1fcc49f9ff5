package main

import (
	"flag"
	"time"
)

// Params change the size of a row, for a smaller machine or a trial. A run with any of them writes nothing.
type Params struct {
	// Nodes is how many nodes a row has, or up to how many it goes.
	Nodes int
	// RTT is the only round-trip time between nodes and hub that is measured; negative: all that the row has.
	RTT time.Duration
	// Callers ask the API meanwhile.
	Callers int
	// Workloads are those of each node.
	Workloads int
	// Rows is how many rows are in a table before, or up to how many it is filled.
	Rows int
	// For is how long a row lasts.
	For time.Duration
}

// register adds the flags.
func (p *Params) register(f *flag.FlagSet) {
	f.IntVar(&p.Nodes, "nodes", 0, "nodes of a row, or up to how many it goes")
	f.DurationVar(&p.RTT, "rtt", -1, "the only round-trip time between nodes and hub that is measured")
	f.IntVar(&p.Callers, "callers", 0, "callers of the API meanwhile")
	f.IntVar(&p.Workloads, "workloads", 0, "workloads of each node")
	f.IntVar(&p.Rows, "rows", 0, "rows that a table has before, or up to how many it is filled")
	f.DurationVar(&p.For, "for", 0, "how long a row, or each of its steps, lasts")
}

// given reports whether one of them is set.
func (p Params) given() bool { return p != Params{RTT: -1} }

// or returns a parameter, or the row's own number where it is not set.
func or[T int | time.Duration](given, own T) T {
	if given > 0 {
		return given
	}
	return own
}
