package ledger

import (
	"fmt"
	"math/big"
	"strings"

	"github.com/gpuaas/gpuaas/protocol"
)

// NanosPerUnit of a currency: amounts have nine digits after the point.
const NanosPerUnit = 1_000_000_000

// ParseNanos reads a decimal amount such as 12.5 exactly.
func ParseNanos(s string) (int64, error) {
	digits := strings.TrimPrefix(s, "-")
	whole, frac, _ := strings.Cut(digits, ".")
	if whole == "" || len(frac) > 9 || strings.ContainsFunc(whole+frac, func(r rune) bool { return r < '0' || r > '9' }) ||
		strings.HasSuffix(s, ".") {
		return 0, fmt.Errorf("not a decimal number with at most nine digits after the point")
	}
	v, _ := new(big.Int).SetString(whole+frac+strings.Repeat("0", 9-len(frac)), 10)
	if strings.HasPrefix(s, "-") {
		v.Neg(v)
	}
	if !v.IsInt64() {
		return 0, fmt.Errorf("out of range")
	}
	return v.Int64(), nil
}

// FormatNanos writes an amount as a decimal, without needless zeros: 12.5, 0.000000001, -3.
func FormatNanos(nanos int64) string { return decimal(nanos, 9) }

// FormatQuantity writes a meter's base units as a decimal in the unit that Unit names.
func FormatQuantity(meter string, quantity int64) string {
	if Unit(meter) == unitSeconds {
		return decimal(quantity, 6)
	}
	return decimal(quantity, 0)
}

const (
	unitSeconds     = "seconds"
	unitByteSeconds = "byte_seconds"
)

// Unit is what a meter's quantity is shown in.
func Unit(meter string) string {
	switch meter {
	case protocol.MeterSessionSeconds, protocol.MeterAcceleratorSeconds, protocol.MeterCPUSeconds,
		MeterAllocationSeconds, MeterAttachmentSeconds:
		return unitSeconds
	case protocol.MeterMemoryByteSeconds, MeterVolumeByteSeconds:
		return unitByteSeconds
	default:
		return "unit"
	}
}

func decimal(v int64, places int) string {
	if places == 0 {
		return fmt.Sprint(v)
	}
	digits := new(big.Int).Abs(big.NewInt(v)).String()
	if n := places + 1 - len(digits); n > 0 {
		digits = strings.Repeat("0", n) + digits
	}
	whole, frac := digits[:len(digits)-places], strings.TrimRight(digits[len(digits)-places:], "0")
	if frac != "" {
		whole += "." + frac
	}
	if v < 0 {
		whole = "-" + whole
	}
	return whole
}
