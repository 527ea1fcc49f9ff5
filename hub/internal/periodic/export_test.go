package periodic

import "github.com/gpuaas/gpuaas/hub/internal/db"

// PassPageRows is how many rows one listing of a pass has.
const PassPageRows = passPageRows

// WithPages bounds one listing.
func (c *RenewLeases) WithPages(rows int) *RenewLeases {
	c.pageRows = rows
	return c
}

// WithBatches bounds the batches, and has observe wrap each transaction; it may be nil.
func (c *DeleteOld) WithBatches(rows, instances int, observe func(db.Tx) db.Tx) *DeleteOld {
	c.batchRows, c.batchInstances, c.observe = rows, instances, observe
	return c
}
