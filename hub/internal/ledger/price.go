package ledger

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Price is a row of the price book. It holds from From until the next row of the same scope begins.
type Price struct {
	ID    string
	Meter string
	// AppSlug and SKU narrow the price; empty means every.
	AppSlug  string
	SKU      string
	Currency string
	Nanos    int64
	// Per is unit, second, minute or hour; PerQuantity is that in base units of the meter.
	Per         string
	PerQuantity int64
	// HostBasisPoints of what is collected go to the host.
	HostBasisPoints int64
	From            time.Time
	// To is zero while no later row follows.
	To        time.Time
	CreatedAt time.Time
}

// maxHourNanos bounds an hour of a time meter, and an hour of pricedBytes, at about a million units of the currency, so
// that no bill of one subject leaves the range of an amount.
const (
	maxHourNanos = 1_000_000 * NanosPerUnit
	pricedBytes  = 16 << 40
)

// basePerGiB: memory and volumes are sold by the GiB, a byte's price would be below a billionth.
const basePerGiB = 1 << 30

// PerQuantity translates "per hour of this meter" into base units: seconds of time meters are microseconds inside, and
// a time unit of memory or of a volume is for one GiB. An app's own meter is sold by the unit.
func PerQuantity(meter, per string) (int64, error) {
	seconds := map[string]int64{"second": 1, "minute": 60, "hour": 3600}[per]
	switch Unit(meter) {
	case unitSeconds:
		if seconds > 0 {
			return seconds * 1_000_000, nil
		}
		return 0, badUnit("a time meter is priced per second, minute or hour")
	case unitByteSeconds:
		if seconds > 0 {
			return seconds * basePerGiB, nil
		}
		return 0, badUnit("memory and volumes are priced per second, minute or hour of one GiB")
	default:
		if per == "unit" {
			return 1, nil
		}
		return 0, badUnit("an app's own meter is priced per unit")
	}
}

func badUnit(reason string) error {
	return fault.New(fault.Unprocessable, codePriceUnitInvalid, "This meter cannot be priced per that unit.",
		nil).WithField("/per", reason)
}

// CreatePrice adds a row to the price book. A price for time that has passed is refused: it may have been billed.
func CreatePrice(ctx context.Context, tx db.Tx, p Price, now time.Time) (Price, error) {
	per, err := PerQuantity(p.Meter, p.Per)
	if err != nil {
		return Price{}, err
	}
	now = now.UTC().Truncate(time.Microsecond)
	if p.From.IsZero() {
		p.From = now
	}
	p.From = p.From.UTC().Truncate(time.Microsecond)
	switch {
	case p.From.Before(now):
		return Price{}, fault.New(fault.Unprocessable, codePriceInThePast, "A price cannot begin in the past; that time "+
			"may have been billed.", nil).
			WithHint("/from", "lies in the past", "leave it out for a price from now on")
	case p.Nanos < 0 || p.HostBasisPoints < 0 || p.HostBasisPoints > rating.BasisPoints:
		return Price{}, fault.New(fault.Unprocessable, codePriceInvalid, "A price is not negative, and a host's share is at "+
			"most all of it.", nil)
	}
	var anHour int64
	switch Unit(p.Meter) {
	case unitSeconds:
		anHour = time.Hour.Microseconds()
	case unitByteSeconds:
		anHour = 3600 * pricedBytes
	}
	if hour, err := rating.ChargeUp(p.Nanos, per, anHour); err != nil || hour > maxHourNanos {
		return Price{}, fault.New(fault.Unprocessable, codePriceInvalid, "An hour at this price is out of range.",
			nil).WithField("/price", "is too large")
	}
	p.ID, p.PerQuantity, p.CreatedAt = db.NewID(), per, now
	made, err := insertPrice(ctx, tx, p)
	if err != nil {
		return Price{}, err
	}
	if !made {
		return Price{}, fault.New(fault.Conflict, codePriceExists, "There is a price of the same scope from the same moment "+
			"on; choose another moment.", nil).
			WithField("/from", "is taken")
	}
	rows, err := pricesOf(ctx, tx, []string{p.Meter})
	if err != nil {
		return Price{}, err
	}
	rows = withEnds(rows)
	return rows[slices.IndexFunc(rows, func(r Price) bool { return r.ID == p.ID })], nil
}

// scope is where one price follows another.
type scope struct{ meter, appSlug, sku, currency string }

func (p Price) scope() scope { return scope{p.Meter, p.AppSlug, p.SKU, p.Currency} }

// withEnds sets each row's To to where the next of its scope begins.
func withEnds(rows []Price) []Price {
	rows = slices.Clone(rows)
	slices.SortFunc(rows, func(a, b Price) int { return a.From.Compare(b.From) })
	last := map[scope]int{}
	for i := range rows {
		if before, ok := last[rows[i].scope()]; ok {
			rows[before].To = rows[i].From
		}
		last[rows[i].scope()] = i
	}
	return rows
}

// schedule gives the prices of one meter for an app and SKU over time, in one currency, without overlap. The most
// particular scope counts (app before SKU) from when it has a row at all.
func schedule(rows []Price, meter, appSlug, sku, currency string) []rating.Price {
	var out []rating.Price
	var taken []rating.Interval
	for _, want := range []scope{
		{meter, appSlug, sku, currency}, {meter, appSlug, "", currency}, {meter, "", sku, currency}, {
			meter, "", "",
			currency,
		},
	} {
		var mine []rating.Interval
		for _, p := range withEnds(rows) {
			if p.scope() != want {
				continue
			}
			whole := rating.Span(p.From, p.To)
			for _, free := range rating.Subtract(whole, taken) {
				out = append(out, p.rated(free))
			}
			mine = append(mine, whole)
		}
		taken = rating.Union(append(taken, mine...))
	}
	return out
}

func (p Price) rated(over rating.Interval) rating.Price {
	return rating.Price{
		ID: p.ID, Meter: p.Meter, Currency: p.Currency, Nanos: p.Nanos, PerQuantity: p.PerQuantity,
		HostBasisPoints: p.HostBasisPoints, From: over.From, To: over.To,
	}
}

// at is the price of the schedule at a moment.
func at(prices []rating.Price, t time.Time) (rating.Price, bool) {
	for _, p := range prices {
		if !t.Before(p.From) && t.Before(p.To) {
			return p, true
		}
	}
	return rating.Price{}, false
}

// nodeMeters are those that a lease freezes prices for.
func nodeMeters() []string {
	return []string{
		protocol.MeterSessionSeconds, protocol.MeterAcceleratorSeconds, protocol.MeterCPUSeconds,
		protocol.MeterMemoryByteSeconds,
	}
}

// currencyOf chooses what a subject is charged in: the given currency, which is the one it already has, or else that of
// the org's oldest wallet; for an org that has no wallet, that of the newest price that applies. Prices that apply in
// other currencies only are an error: nothing becomes free because nobody wrote its price in the tenant's currency.
func currencyOf(s subject, currency string, meters []string, rows []Price, now time.Time) (string, error) {
	var others []string
	for _, p := range withEnds(rows) {
		if p.From.After(now) || !p.appliesTo(s) || !slices.Contains(meters, p.Meter) {
			continue
		}
		if p.Currency == currency {
			return currency, nil
		}
		others = append(others, p.Currency)
	}
	switch {
	case len(others) == 0:
		return currency, nil
	case currency == "":
		return others[len(others)-1], nil
	}
	return "", currencyMissing("price", currency)
}

func currencyMissing(price, currency string) error {
	return fault.New(fault.Conflict, codePriceCurrencyMissing,
		fmt.Sprintf("There is no %s in %s, the currency of the org's wallet; ask the platform's admin to add one.",
			price, currency), nil)
}

func (p Price) appliesTo(s subject) bool {
	return (p.AppSlug == "" || p.AppSlug == s.AppSlug) && (p.SKU == "" || p.SKU == s.SKU)
}
