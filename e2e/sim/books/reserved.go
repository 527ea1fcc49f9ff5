package books

import (
	"errors"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
)

// Reserve starts billing of what an org reserves. It fails with ErrUnaffordable where the wallet does not cover the
// first hour.
func (b *Books) Reserve(org, nodeID string, r billing.Reserved) error {
	lacks, err := r.Lacks(r.Until, billing.ReservedAhead)
	if err != nil {
		return err
	}
	if lacks > b.Wallet(org) {
		return ErrUnaffordable
	}
	b.Reserved[r.ID] = &Reservation{r, org, nodeID, r.Until}
	return b.hold(b.Reserved[r.ID], lacks)
}

// Accrue bills what is reserved up to now and has its hold reach ahead; exhausted says that the wallet does not cover
// the next billing.ReservedNotice.
func (b *Books) Accrue(id string, now time.Time) (exhausted bool, err error) {
	r := b.Reserved[id]
	until := now
	if until.Before(r.Until) {
		until = r.Until
	}
	if err := b.accrue(r, until, billing.ReservedAhead); err != nil {
		return false, err
	}
	return r.Exhausted(now)
}

// Release bills what is reserved up to a moment and gives back what is left of its hold.
func (b *Books) Release(id string, at, now time.Time) error {
	r := b.Reserved[id]
	if err := b.accrue(r, billing.CloseAt(r.OpenedAt, at, now), 0); err != nil {
		return err
	}
	delete(b.Reserved, id)
	rest := r.Hold.Balance()
	if rest == 0 {
		return nil
	}
	return b.post(billing.Transfer(billing.HoldAccount(id), billing.WalletAccount(r.Org), b.Currency, rest))
}

func (b *Books) accrue(r *Reservation, until time.Time, ahead time.Duration) (err error) {
	if b.Faults.LateHold {
		defer func() { err = errors.Join(err, b.extend(r, until, ahead)) }()
	} else if err := b.extend(r, until, ahead); err != nil {
		return err
	}
	next, charges, err := r.Accrue(b.Book, until)
	if err != nil {
		return err
	}
	r.Reserved = next
	for _, c := range charges {
		if err := b.postCharge(r.NodeID, c); err != nil {
			return err
		}
	}
	return nil
}

// extend has the hold pay up to a moment and so far ahead of it, as far as the wallet does.
func (b *Books) extend(r *Reservation, to time.Time, ahead time.Duration) error {
	lacks, err := r.Lacks(to, ahead)
	if err != nil {
		return err
	}
	return b.hold(r, min(lacks, b.Wallet(r.Org)))
}

// hold moves money from the wallet into the hold.
func (b *Books) hold(r *Reservation, nanos int64) error {
	if nanos == 0 {
		return nil
	}
	r.Hold.Placed += nanos
	return b.post(billing.Transfer(billing.WalletAccount(r.Org), billing.HoldAccount(r.ID), b.Currency, nanos))
}
