package event

import "github.com/gpuaas/gpuaas/hub/internal/db"

// WithTx puts something around each of the sequencer's transactions.
func (s *Sequencer) WithTx(observe func(db.Tx) db.Tx) *Sequencer {
	s.observe = observe
	return s
}
