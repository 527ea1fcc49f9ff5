package recovery

import "github.com/gpuaas/gpuaas/hub/internal/db"

// UseOf is useOf.
var UseOf = useOf

// WithAround has fn run each transaction's body.
func (u *Uploads) WithAround(fn func(tx db.Tx, body func(db.Tx) error) error) *Uploads {
	u.around = fn
	return u
}
