package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// byteSize is a flag in bytes, written like 5GiB.
type byteSize int64

// defaultRegistryMinFree keeps room for the database beside the registry.
const defaultRegistryMinFree byteSize = 5 << 30

// String is part of pflag.Value.
func (b *byteSize) String() string {
	for _, unit := range byteUnits() {
		if *b != 0 && *b%unit.bytes == 0 {
			return fmt.Sprint(int64(*b/unit.bytes)) + unit.name
		}
	}
	return fmt.Sprint(int64(*b))
}

// Set is part of pflag.Value.
func (b *byteSize) Set(text string) error {
	factor := byteSize(1)
	for _, unit := range byteUnits() {
		if number, ok := strings.CutSuffix(text, unit.name); ok {
			text, factor = number, unit.bytes
			break
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/int64(factor) {
		return errors.New("must be a size like 500MiB or 5GiB")
	}
	*b = byteSize(n) * factor
	return nil
}

// Type is part of pflag.Value.
func (*byteSize) Type() string { return "size" }

type byteUnit struct {
	name  string
	bytes byteSize
}

func byteUnits() []byteUnit {
	return []byteUnit{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}
}
