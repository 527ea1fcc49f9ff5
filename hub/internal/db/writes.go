package db

import (
	"regexp"
	"slices"
	"sync"
)

// maxKnownStatements bounds the statements whose tables are remembered; those of others are found each time. The hub
// has fewer.
const maxKnownStatements = 4096

// tableWatches has who learns of transactions that write a table. Its zero value is ready.
type tableWatches struct {
	mu      sync.Mutex
	watches []tableWatch
	// known has the indexes of the watches of what a statement writes, by its text.
	known map[string][]int
	write *regexp.Regexp
}

type tableWatch struct {
	tables []string
	wrote  func()
}

// OnWrite calls wrote after each commit of a transaction of this process that wrote one of the tables, before RunTx
// returns; after a commit of unknown outcome too. It is for caches of what the tables hold: they need not know who
// writes. wrote must not block.
func (d *DB) OnWrite(tables []string, wrote func()) {
	w := &d.writes
	w.mu.Lock()
	defer w.mu.Unlock()
	w.watches = append(w.watches, tableWatch{tables, wrote})
	w.known = map[string][]int{}
	w.write = regexp.MustCompile(`(?i)\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|COPY)\s+([a-z_][a-z0-9_]*)`)
}

// of returns the indexes of the watches of what a statement writes.
func (w *tableWatches) of(sql string) []int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.watches) == 0 {
		return nil
	}
	found, known := w.known[sql]
	if known {
		return found
	}
	for _, m := range w.write.FindAllStringSubmatch(sql, -1) {
		for n, watch := range w.watches {
			if slices.Contains(watch.tables, m[1]) && !slices.Contains(found, n) {
				found = append(found, n)
			}
		}
	}
	if len(w.known) < maxKnownStatements {
		w.known[sql] = found
	}
	return found
}

// announce calls the watches with these indexes.
func (w *tableWatches) announce(indexes []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range indexes {
		w.watches[n].wrote()
	}
}

// sends notes what a statement writes.
func (w *retryingTx) sends(sql string) {
	if w.writes == nil {
		return
	}
	for _, n := range w.writes.of(sql) {
		if !slices.Contains(w.wrote, n) {
			w.wrote = append(w.wrote, n)
		}
	}
}
