"""The fidelity microscope: how much attention mass does a page selector keep on a real model?"""
