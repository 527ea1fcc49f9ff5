package state

import "github.com/dgraph-io/badger/v4"

// Lose takes the n-th entry with this prefix from the disk alone, as a disk that fails does.
func (s *Store) Lose(prefix string, n int) error {
	return s.db.Update(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.IteratorOptions{Prefix: []byte(prefix)})
		defer it.Close()
		it.Rewind()
		for range n {
			it.Next()
		}
		return tx.Delete(it.Item().KeyCopy(nil))
	})
}
