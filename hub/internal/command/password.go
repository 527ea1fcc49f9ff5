package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// actionPassword is the audit action of a changed password.
const actionPassword = "iam.user.change_password"

// ChangePasswordInput proves who asks, and says what changes.
type ChangePasswordInput struct {
	Current, Code string
	// New is empty where the password stays.
	New string
	// TOTP sets up one-time codes, RemoveTOTP ends them.
	TOTP       *iam.TOTP
	RemoveTOTP bool
}

// ChangePassword changes the caller's own password and one-time codes, and ends the caller's other sessions.
func (s *Service) ChangePassword(ctx context.Context, m Meta, in ChangePasswordInput) error {
	if err := in.check(); err != nil {
		return err
	}
	found, err := db.Query(ctx, s.DB, func(tx db.Tx) (iam.Password, error) {
		if m.Principal.Type != principal.User {
			return iam.Password{}, nil
		}
		return iam.PasswordOfUser(ctx, tx, m.Principal.ID)
	})
	if err != nil {
		return err
	}
	matches, c := false, iam.PasswordChange{TOTP: in.TOTP, RemoveTOTP: in.RemoveTOTP}
	if err := s.hash(ctx, func() {
		if matches = found.Matches(in.Current); matches && in.New != "" {
			c.Hash = iam.HashPassword(in.New)
		}
	}); err != nil {
		return err
	}
	if !matches {
		return iam.ErrPasswordRefused()
	}
	return do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		user, err := iam.CheckLogin(ctx, tx, s.Sealer, found, in.Code, m.Now)
		if fault.Is(err, fault.Unauthenticated) {
			err = iam.ErrPasswordRefused()
		}
		if err != nil {
			return err
		}
		after, err := iam.ChangePassword(ctx, tx, s.Sealer, user, c, m.Principal.SessionID, m.Now)
		if err != nil {
			return err
		}
		return m.recordUser(ctx, tx, "iam.user.password_changed", actionPassword, after, nil, map[string]any{
			"password":       in.New != "",
			"one_time_codes": map[bool]string{in.TOTP != nil: "set up", in.RemoveTOTP: "removed"}[true],
		})
	})
}

func (in ChangePasswordInput) check() error {
	bad := func(pointer, why string) error {
		return fault.New(fault.Unprocessable, fault.CodeInvalid, "The request is well-formed but not acceptable.",
			nil).WithField(pointer, why).Permanent()
	}
	switch {
	case in.New == "" && in.TOTP == nil && !in.RemoveTOTP:
		return bad("/new_password", "is required where nothing else changes")
	case in.TOTP != nil && in.RemoveTOTP:
		return bad("/remove_one_time_codes", "contradicts totp")
	}
	return nil
}
