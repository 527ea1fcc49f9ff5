package db

// Changed implements Tx.
func (w *retryingTx) Changed(resourceIDs ...string) { w.changed = append(w.changed, resourceIDs...) }

// Changed implements Tx; a query changes nothing.
func (queryOnly) Changed(...string) {}

// announce signals the subscribers of what a transaction changed. A commit of unknown outcome may have happened: who
// waits reads again and sees.
func (d *DB) announce(o outcome, w *retryingTx) {
	if w != nil && (o == committed || o == unknown) {
		d.changes.Notify(w.changed...)
	}
}
