package sim

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/gpuaas/gpuaas/e2e/sim/books"
	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
)

// accrualPause is how often a hub bills what is reserved, askAgain how long an org that ran out of money waits until it
// asks for another allocation.
const (
	accrualPause = 10 * minute
	askAgain     = day
)

// reservation is an allocation of an org as the hub's rows have it. No member runs in it.
type reservation struct {
	id     string
	org    int
	opened time.Time
	// released is zero while it is open.
	released time.Time
}

// reserve gives an org an allocation on a node, at a twentieth of a unit an hour.
func (h *hub) reserve(org int) {
	r := reservation{
		id: fmt.Sprintf("allocation-%d-%d", org, len(h.rows.reserved)), org: org, opened: h.w.now.time(),
	}
	err := h.rows.books.Reserve(strconv.Itoa(org), h.rows.nodes[org%len(h.rows.nodes)].id, billing.Reserved{
		ID: r.id, Meter: "allocation_seconds", Until: r.opened, Prices: []rating.Price{{
			ID: "price-2", Nanos: 50_000_000, PerQuantity: int64(hour), HostBasisPoints: 7000,
		}},
	})
	if errors.Is(err, books.ErrUnaffordable) {
		h.planReservation(org)
		return
	}
	h.booked(err)
	h.rows.reserved = append(h.rows.reserved, r)
}

func (h *hub) planReservation(org int) {
	h.w.after(askAgain, -1, "reserve", func() {
		if h.up && !h.holds(org) {
			h.reserve(org)
		}
	})
}

// holds reports whether an org has an allocation: a restored hub may have one again.
func (h *hub) holds(org int) bool {
	for _, r := range h.rows.reserved {
		if r.org == org && r.released.IsZero() {
			return true
		}
	}
	return false
}

// planAccrual bills what is reserved now and then, as long as this process lives.
func (h *hub) planAccrual(after instant) {
	life := h.life
	h.w.after(after, -1, "accrue", func() {
		if h.life != life || !h.up {
			return
		}
		for i := range h.rows.reserved {
			if r := &h.rows.reserved[i]; r.released.IsZero() {
				h.accrue(r)
			}
		}
		h.planAccrual(accrualPause)
	})
}

func (h *hub) accrue(r *reservation) {
	b, now := h.rows.books, h.w.now.time()
	writtenOff := b.Balances[billing.AccountWriteOff]
	exhausted, err := b.Accrue(r.id, now)
	h.booked(err)
	if wallet := b.Wallet(strconv.Itoa(r.org)); wallet > 0 && b.Balances[billing.AccountWriteOff] != writtenOff {
		h.w.fail(5, "time of %s is written off and its org has %d", r.id, wallet)
	}
	if exhausted {
		r.released = now
		h.booked(b.Release(r.id, now, now))
		h.planReservation(r.org)
	}
}

// reserved checks laws 5, 6 and 13: all time of what is reserved is billed once, from the claim to the release.
func (o *oracle) reserved() {
	b := o.w.hub.rows.books
	for _, r := range o.w.hub.rows.reserved {
		var billed rating.Accrual
		for _, h := range b.Book.Hours[r.id] {
			billed.Quantity += h.Quantity
			billed.CollectedNanos += h.CollectedNanos
		}
		o.w.result.Checked[5]++
		until, account := r.released, b.Balances[billing.HoldAccount(r.id)]
		if open := b.Reserved[r.id]; open != nil {
			until = open.Until
			if o.w.now.time().Sub(until) > accrualPause.dur() {
				o.w.fail(13, "%s is billed until %s only", r.id, until)
			}
			if account != open.Hold.Balance() || billed.CollectedNanos != open.Hold.Posted {
				o.w.fail(6, "the hold of %s has %d left of %d posted, its account %d, its hours %d", r.id, open.Hold.Balance(),
					open.Hold.Posted, account, billed.CollectedNanos)
			}
		} else if account != 0 {
			o.w.fail(6, "%s is released, and its hold has %d", r.id, account)
		}
		if held := until.Sub(r.opened).Microseconds(); billed.Quantity != held {
			o.w.fail(5, "%s was held %s and is billed %s", r.id, instant(held).dur(), instant(billed.Quantity).dur())
		}
	}
}
